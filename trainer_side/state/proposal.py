"""The table of this rank's tensors: what all ranks compare before they plan, and how much room each asks for.

A layout comes out the same on ranks whose tables are the same (docs/design/003-one-layout-torch-zip.md).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.errors import StateError
from holdfast.image.entries import SPLIT, TEXT_MAX
from holdfast.image.regions import Region
from holdfast.wire.held_regions import HeldRegions
from holdfast.wire.state_union import Stage
from trainer_side.state.checksums import checksums
from trainer_side.state.parameter_names import settings
from trainer_side.state.per_rank import PerRank, encode, reserve_bytes
from trainer_side.state.per_rank_places import Blobs
from trainer_side.state.pickling import REFUSED, Pickling, blame
from trainer_side.state.shards import Shards
from trainer_side.state.split_tensor import Held
from trainer_side.state.stages import held_whole, outline
from trainer_side.state.survey import Survey, survey
from trainer_side.state.tree import classify, tensor_paths


class Table(NamedTuple):
    """The table that the ranks compare before they plan.

    Attributes:
        rows: `[path, dtype, shape, owner]` of each tensor, in order. Where strides, or a storage shared with another
            tensor, matter, the dtype column says so: replicas are only interchangeable if these agree, too.
        digest: SHA-256 over the rows.
        pickle_bytes: What data.pkl takes, without slack; 0 on ranks other than 0, whose is not sent.
        per_rank_bytes: What each `PerRank` value takes here, with slack.
        sums: For each row the CRC-32 of all bytes of the tensor; empty where there is nobody to compare with.
        sum_seconds: What that took.
        held: For each row that is split, the region that this rank holds. Of a stage, too, for each that can be sent
            as it lies.
        stage: See `table`.
    """

    rows: list[list[Any]]
    digest: str
    pickle_bytes: int
    per_rank_bytes: dict[str, int]
    sums: tuple[int, ...]
    sum_seconds: float
    held: HeldRegions
    stage: Stage | None = None


def table(
    state: Mapping[str, Any],
    tree: Mapping[str, Any],
    *,
    rank: int,
    ranks: int,
    names: Mapping[str, Sequence[Sequence[str]]] | None = None,
    sums: Sequence[int] = (),
    beside_bytes: int = 0,
) -> Table:
    """What this rank proposes. Training thread; reads every byte of the state once, moves none.

    Args:
        state: The state.
        tree: What `collect` gave.
        rank: This rank.
        ranks: Number of ranks.
        names: Of the parameters of each optimizer, where the ranks have different tensors: then a stage is proposed.
        sums: Those of a table of the same tensors; empty: they are made.
        beside_bytes: What data.pkl takes beside the pickle.

    Raises:
        StateError: A tensor, or a plain value, is of a kind that cannot be saved; names its path.
    """
    needed = {
        name: reserve_bytes(len(encode(value.snapshot(), name=name, beside=value.names)))
        for name, value in tree.items()
        if isinstance(value, PerRank)
    }
    blobs = Blobs.of(ranks, needed)
    expanded = Shards().expand(blobs.expand(tree))
    full, held = expanded.tree, expanded.held
    found = survey(full)
    owned = blobs.own(classify(state, full))
    for slot in found.slots:
        _refuse_unwritable(slot.path)
    keys = {number: key for key, number in found.numbers.items()}
    blob_paths = blobs.paths
    rows: list[list[Any]] = [
        # The size of a blob is what is being agreed on: it may differ still.
        [
            slot.path,
            *(("bytes", []) if slot.path in blob_paths else (found.description(slot), list(slot.shape))),
            SPLIT if slot.path in held and 0 not in slot.shape else owned[keys[slot.storage]].owner,
        ]
        for slot in found.slots
    ]
    regions = {
        row: (held[path].local.itemsize, held[path].region)
        for row, (path, _, _, owner) in enumerate(rows)
        if owner == SPLIT
    }
    stage = None
    if names is not None:
        stage = Stage(
            outline(full), {at: [*zip(of, settings(tree, at), strict=True)] for at, of in names.items()}
        )
        for row, (_, tensor) in enumerate(tensor_paths(full)):
            if row not in regions and held_whole(tensor):
                regions[row] = tensor.itemsize, Region((0,) * tensor.dim(), tuple(tensor.shape))
    try:
        is_pickled = rank == 0 or stage is not None
        pickle_bytes = len(Pickling(found).head(full)) + beside_bytes if is_pickled else 0
    except REFUSED as error:
        raise blame(full, found, error) from error
    digest = hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()
    begun = time.perf_counter()
    if len(sums) != len(rows):
        sums = _sums(found, blob_paths, held) if ranks > 1 else ()
    seconds = time.perf_counter() - begun
    here = HeldRegions.of((row, *regions[row]) for row in sorted(regions))
    return Table(rows, digest, pickle_bytes, needed, tuple(sums), seconds, here, stage)


def _sums(found: Survey, blob_paths: Collection[str], held: Mapping[str, Held]) -> tuple[int, ...]:
    """One for each row; of a split tensor that of the region that is here."""
    whole = checksums(found, {*blob_paths, *held})
    if not held:
        return whole
    here = {path: part.local for path, part in held.items()}
    local = dict(zip(here, checksums(survey(here), ()), strict=True))
    return tuple(local.get(slot.path, crc) for slot, crc in zip(found.slots, whole, strict=True))


def _refuse_unwritable(path: str) -> None:
    """A path that layout and manifest cannot hold is refused here, on the rank that has it, before anything is sent."""
    if len(path) > TEXT_MAX:
        why = f"its path has {len(path)} characters, expected at most {TEXT_MAX}; shorten its keys"
    elif not path.isprintable() and any("\ud800" <= one <= "\udfff" for one in path):
        why = "a key of its path has half a surrogate pair, which is no text that a file can hold; rename it"
    else:
        return
    raise StateError(f"tensor {ascii(path[:80])[1:-1]}: {why}")
