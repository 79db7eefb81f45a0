"""The skeleton: the file that `torch.save` would write, with holes where the tensors go.

    plan, once per set of tensors                           capture, every save
    ──────────────────────────────────────────────────      ────────────────────────────────────────────
    survey the tree: tensors, their storages, the part      do the tensors still fit? recall the last capture, or
      of each storage that is used                            survey again; data.pkl anew (rank 0), padded
    torch.save(skip_data) ─► literals and holes             PerRank blobs anew, padded to theirs
    read the zip's structure ─► Layout, CRC fields          where each storage lies now
    torch.load(weights_only) of it: would it be accepted?

torch itself writes pickle and zip. A pickler of ours gives it, for each storage, a `meta` stand-in of the size that is
really used, on device `cpu`: so ties stay tied, a view does not drag its whole storage along, and the file loads
anywhere without `map_location`. Zero bytes after the pickle's end fill data.pkl up to its reserve, so that the layout
stays the same while plain values grow; every reader stops at the pickle's own end.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from holdfast.crc import crc32
from holdfast.errors import StateError
from holdfast.layout import Entry, Extent, Layout, TensorInfo
from trainer_side.image import Literals, SparseFile
from trainer_side.per_rank import PerRank, encode, reserve_bytes
from trainer_side.pickling import REFUSED, Pickling, blame, load_structure
from trainer_side.recall import Recall
from trainer_side.state import Ownership, classify
from trainer_side.survey import Source, Survey, survey

__all__ = ["Capture", "Outgrown", "Skeleton", "Source", "Table", "capture", "plan", "table"]

_PICKLE = "archive/data.pkl"
_SERIALIZATION_ID = "archive/.data/serialization_id"
_STORAGE_PREFIX = "archive/data/"


class Outgrown(StateError):
    """A value no longer fits the room that was agreed for it.

    Attributes:
        name: Empty for data.pkl, otherwise the name of the `PerRank` value.
        needed_bytes: What it takes now, without slack.
    """

    def __init__(self, name: str, needed_bytes: int, reserve: int) -> None:
        what = f"{name}: the PerRank value takes" if name else "the plain values of the state take"
        then = "keep its size bounded, or restart" if name else "the next checkpoint gets more room"
        super().__init__(f"{what} {needed_bytes} bytes, {reserve} were set aside; {then}")
        self.name = name
        self.needed_bytes = needed_bytes


class Table(NamedTuple):
    """What the ranks compare before they plan.

    Attributes:
        rows: `[path, dtype, shape, owner]` of each tensor, in order. Where strides, or a storage shared with another
            tensor, matter, the dtype column says so: replicas are only interchangeable if these agree, too.
        digest: SHA-256 over the rows.
        pickle_bytes: What data.pkl takes, without slack; 0 on ranks other than 0, whose is not sent.
        per_rank_bytes: What each `PerRank` value takes here, with slack.
    """

    rows: list[list[Any]]
    digest: str
    pickle_bytes: int
    per_rank_bytes: dict[str, int]


@dataclass(frozen=True)
class Structure:
    """The parts of the zip.

    Attributes:
        entries: Those of the layout.
        gated: Per entry, whether it is copied behind the gate.
        pickle_entry: Index of data.pkl.
        serialization_id_entry: Index of the id with which torch tells files apart.
        serialization_id: What torch wrote there when the plan was made.
        storage_entries: Storage number to entry index.
        constant_crcs: CRC fields of records that never change.
    """

    entries: tuple[Entry, ...]
    gated: tuple[bool, ...]
    pickle_entry: int
    serialization_id_entry: int
    serialization_id: bytes
    storage_entries: tuple[int, ...]
    constant_crcs: Mapping[int, int]


@dataclass(frozen=True)
class Skeleton:
    """A plan for all checkpoints with the same tensors. Made by `plan`; not changed, may be read from any thread. What
    `capture` has learnt is kept with it, for the training thread alone.

    Attributes:
        layout: The same on every rank.
        literals: All bytes of the image outside the entries, CRC fields as zeros; the same on every rank.
        gated: Per entry of the layout, whether it is copied behind the gate.
        rank: The rank whose plan this is.
        signature: The tensors that it is made for.
        structure: The parts of the zip.
    """

    layout: Layout
    literals: Literals
    gated: tuple[bool, ...]
    rank: int
    signature: tuple[Any, ...]
    structure: Structure
    _blobs: Mapping[str, list[torch.Tensor]]
    _blob_entries: Mapping[str, list[int]]
    _accepted: set[Any]  # classes of values of which weights_only is known to read the pickle
    _recalls: list[Recall]  # the newest, if any; the training thread's

    def write_literals(self, extent: Extent, out: memoryview) -> None:
        """Lay the literals of a part of the image into `out`; bytes of entries are left as they are."""
        self.literals.write(extent.offset, out[: extent.nbytes])


class Capture(NamedTuple):
    """One checkpoint's contents. `sources` are live: copy gated ones before the gate opens, the others at once.

    Attributes:
        sources: Per entry of the layout the storage to copy; None where `contents` has the bytes, or another rank does.
        contents: Bytes of data.pkl and the serialization id (rank 0), and of this rank's `PerRank` values; by entry.
        signature: See `Skeleton.signature`.
    """

    sources: list[Source | None]
    contents: dict[int, bytes]
    signature: tuple[Any, ...]


def table(state: Mapping[str, Any], tree: Mapping[str, Any], *, rank: int, ranks: int) -> Table:
    """What this rank proposes. Training thread; moves no tensor bytes.

    Args:
        state: The state.
        tree: What `collect` gave.
        rank: This rank.
        ranks: Number of ranks.

    Raises:
        StateError: A tensor, or a plain value, is of a kind that cannot be saved; names its path.
    """
    needed = {
        name: reserve_bytes(len(encode(value.snapshot(), name=name)))
        for name, value in tree.items()
        if isinstance(value, PerRank)
    }
    blobs = _make_blobs(ranks, needed)
    full = _expand(tree, blobs)
    found = survey(full)
    owned = _ownership(classify(state, full), blobs)
    keys = {number: key for key, number in found.numbers.items()}
    blob_paths = {f"{name}/{index}" for name in blobs for index in range(ranks)}
    rows = [
        # The size of a blob is what is being agreed on: it may differ still.
        [
            slot.path,
            *(("bytes", []) if slot.path in blob_paths else (found.description(slot), list(slot.shape))),
            owned[keys[slot.storage]].owner,
        ]
        for slot in found.slots
    ]
    try:
        pickle_bytes = len(Pickling(found).head(full)) if rank == 0 else 0
    except REFUSED as error:
        raise blame(full, found, error) from error
    digest = hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()
    return Table(rows, digest, pickle_bytes, needed)


def plan(
    tree: Mapping[str, Any],
    classes: Mapping[int, Ownership],
    *,
    rank: int,
    ranks: int,
    chunk_bytes: int,
    pickle_reserve_bytes: int,
    per_rank_reserve_bytes: Mapping[str, int],
) -> Skeleton:
    """Lay out the image. The layout and the literals come out the same on every rank that holds the same tensors.

    Training thread; moves no tensor bytes, so its cost grows with the number of tensors, not with their size.

    Args:
        tree: What `collect` gave.
        classes: What `classify` gave.
        rank: This rank.
        ranks: Number of ranks.
        chunk_bytes: Size of a chunk.
        pickle_reserve_bytes: Agreed room for data.pkl.
        per_rank_reserve_bytes: Agreed room for each `PerRank` value.

    Raises:
        Outgrown: On rank 0, data.pkl does not fit its reserve.
        StateError: Something in the state cannot be saved, or not be loaded again with `weights_only=True`; names its
            path.
    """
    marked = sorted(name for name, value in tree.items() if isinstance(value, PerRank))
    if marked != sorted(per_rank_reserve_bytes):
        raise StateError(
            f"this rank has the PerRank values {marked}, the ranks agreed on {sorted(per_rank_reserve_bytes)}"
        )
    blobs = _make_blobs(ranks, per_rank_reserve_bytes)
    full = _expand(tree, blobs)
    found = survey(full)
    image, job, fits = SparseFile(), Pickling(found), True

    def pad(pickled: bytes) -> bytes:
        nonlocal fits
        fits = len(pickled) <= pickle_reserve_bytes
        if not fits and rank == 0:
            raise Outgrown("", len(pickled), pickle_reserve_bytes)
        # On other ranks only the size matters: theirs is not sent.
        return pickled[:pickle_reserve_bytes].ljust(pickle_reserve_bytes, b"\0")

    try:
        job.save(full, image, pad)
        if fits:
            load_structure(image)
    except REFUSED as error:
        raise blame(full, found, error) from error
    structure = _structure(image, found, _ownership(classes, blobs))
    layout = Layout(image.nbytes, chunk_bytes, ranks, structure.entries, _tensor_infos(found, structure))
    crcs = {crc_field: 0 for entry in layout.entries for crc_field in entry.crc_fields}
    return Skeleton(
        layout=layout,
        literals=image.literals.without(
            [(entry.offset, entry.end) for entry in layout.entries], {**crcs, **structure.constant_crcs}
        ),
        gated=structure.gated,
        rank=rank,
        signature=found.signature,
        structure=structure,
        _blobs=blobs,
        _blob_entries={
            name: [
                structure.storage_entries[found.numbers[tensor.untyped_storage()._cdata]]
                for tensor in tensors
            ]
            for name, tensors in blobs.items()
        },
        _accepted=job.kinds,
        _recalls=[],
    )


def capture(tree: Mapping[str, Any], skeleton: Skeleton) -> Capture | None:
    """The cheap step of every save: what is small is made, what is large is pointed to. Training thread.

    Args:
        tree: What `collect` gave.
        skeleton: The plan.

    Returns:
        None if the tensors are not those of the plan any more: make a new one.

    Raises:
        Outgrown: A plain or `PerRank` value no longer fits the room set aside for it.
        StateError: A plain value is of a kind that cannot be saved; names its path.
    """
    blobs, structure = skeleton._blobs, skeleton.structure
    per_rank = {name: value for name, value in tree.items() if isinstance(value, PerRank)}
    if per_rank.keys() != blobs.keys():
        return None
    full = _expand(tree, blobs)
    found = _recalled(full, skeleton) or _in_full(full, skeleton)
    if found is None:
        return None
    sources, data_pkl = found
    contents: dict[int, bytes] = {}
    if data_pkl is not None:
        contents[structure.pickle_entry] = data_pkl
        contents[structure.serialization_id_entry] = structure.serialization_id
    for name, entries in skeleton._blob_entries.items():
        entry = entries[skeleton.rank]
        reserve = skeleton.layout.entries[entry].nbytes
        blob = encode(per_rank[name].snapshot(), name=name)
        if len(blob) > reserve:
            raise Outgrown(name, len(blob), reserve)
        contents[entry] = blob.ljust(reserve, b"\0")
    return Capture(sources, contents, skeleton.signature)


_Found = tuple[list[Source | None], bytes | None]  # per entry its storage; data.pkl, padded (rank 0)


def _recalled(full: Mapping[str, Any], skeleton: Skeleton) -> _Found | None:
    """What `_in_full` would give, where only values have changed since it last gave something; else None."""
    for recall in skeleton._recalls:
        seen = recall.look(full)
        if seen is None:
            return None
        sources = recall.sources(seen, len(skeleton.layout.entries))
        if skeleton.rank != 0:
            return sources, None
        pickled = recall.pickle(full, seen)
        reserve = skeleton.layout.entries[skeleton.structure.pickle_entry].nbytes
        if pickled is not None and len(pickled[0]) <= reserve and pickled[1] <= skeleton._accepted:
            return sources, pickled[0].ljust(reserve, b"\0")
    return None


def _in_full(full: Mapping[str, Any], skeleton: Skeleton) -> _Found | None:
    """Survey and pickle; None if the tensors are not those of the plan."""
    structure = skeleton.structure
    skeleton._recalls.clear()
    found = survey(full)
    if found.signature != skeleton.signature:
        return None
    blob_entries = {entry for entries in skeleton._blob_entries.values() for entry in entries}
    sources: list[Source | None] = [None] * len(skeleton.layout.entries)
    for number, part in enumerate(found.parts):
        entry = structure.storage_entries[number]
        if entry not in blob_entries:
            sources[entry] = part.source(entry)
    pickled = _pickled(full, found, skeleton) if skeleton.rank == 0 else None
    recall = Recall.of(full, found, structure.storage_entries, leave_out=blob_entries, pickled=pickled)
    if recall is not None:
        skeleton._recalls.append(recall)
    if pickled is None:
        return sources, None
    return sources, pickled[1].ljust(skeleton.layout.entries[structure.pickle_entry].nbytes, b"\0")


def _pickled(full: Mapping[str, Any], found: Survey, skeleton: Skeleton) -> tuple[Pickling, bytes]:
    """The pickle of this save, of which it is known that torch.load takes it."""
    job = Pickling(found)
    entry = skeleton.layout.entries[skeleton.structure.pickle_entry]
    try:
        pickled = job.head(full)
    except REFUSED as error:
        raise blame(full, found, error) from error
    if len(pickled) > entry.nbytes:
        raise Outgrown("", len(pickled), entry.nbytes)
    if not job.kinds <= skeleton._accepted:
        # A class of values that was not in the state when it was planned: see again whether it can be loaded.
        file = SparseFile.of(skeleton.literals, skeleton.layout.image_bytes)
        try:
            load_structure(file.overlaid(entry.offset, pickled.ljust(entry.nbytes, b"\0")))
        except REFUSED as error:
            raise blame(full, found, error) from error
        skeleton._accepted.update(job.kinds)
    return job, pickled


# -- PerRank values ----------------------------------------------------------------------------------------------


def _make_blobs(ranks: int, reserves: Mapping[str, int]) -> dict[str, list[torch.Tensor]]:
    """Stand-ins for every rank's blob: memory that is never touched."""
    return {
        name: [torch.empty(reserve, dtype=torch.uint8, device="cpu") for _ in range(ranks)]
        for name, reserve in reserves.items()
    }


def _expand(tree: Mapping[str, Any], blobs: Mapping[str, list[torch.Tensor]]) -> dict[str, Any]:
    return {name: blobs[name] if isinstance(value, PerRank) else value for name, value in tree.items()}


def _ownership(
    classes: Mapping[int, Ownership], blobs: Mapping[str, list[torch.Tensor]]
) -> dict[int, Ownership]:
    owned = dict(classes)
    for tensors in blobs.values():
        for rank, tensor in enumerate(tensors):
            owned[tensor.untyped_storage()._cdata] = Ownership(rank, gated=False)
    return owned


# -- the zip -----------------------------------------------------------------------------------------------------


def _structure(image: SparseFile, found: Survey, owned: Mapping[int, Ownership]) -> Structure:
    ownership = {number: owned[key] for key, number in found.numbers.items()}
    entries: list[Entry] = []
    gated: list[bool] = []
    by_name: dict[str, int] = {}
    constant_crcs: dict[int, int] = {}
    for record in image.records():
        role = Ownership(0, gated=False)
        if record.name.startswith(_STORAGE_PREFIX):
            number = int(record.name.removeprefix(_STORAGE_PREFIX))
            assert record.nbytes == found.parts[number].nbytes, (
                "torch.save numbers storages as the survey does"
            )
            role = ownership[number]
        elif record.name not in (_PICKLE, _SERIALIZATION_ID):
            crc = crc32(image.read_at(record.offset, record.nbytes))
            constant_crcs.update(dict.fromkeys(record.crc_fields, crc))
            continue
        by_name[record.name] = len(entries)
        entries.append(Entry(record.name, record.offset, record.nbytes, role.owner, record.crc_fields))
        gated.append(role.gated)
    identity = by_name[_SERIALIZATION_ID]
    return Structure(
        entries=tuple(entries),
        gated=tuple(gated),
        pickle_entry=by_name[_PICKLE],
        serialization_id_entry=identity,
        serialization_id=image.read_at(entries[identity].offset, entries[identity].nbytes),
        storage_entries=tuple(by_name[f"{_STORAGE_PREFIX}{number}"] for number in range(len(found.parts))),
        constant_crcs=constant_crcs,
    )


def _tensor_infos(found: Survey, structure: Structure) -> tuple[TensorInfo, ...]:
    return tuple(
        TensorInfo(slot.path, slot.dtype, slot.shape, structure.storage_entries[slot.storage])
        for slot in found.slots
    )
