"""The table of this rank's tensors, which all ranks compare before they plan, and the room that this rank needs.

The CRC-32 of every byte of every tensor proves that replicas are equal (`holdfast/wire/replica_proof.py`). Once for
each agreement of the ranks, host memory is read in place, and device memory is copied through two pinned buffers.

Ranks with equal tables get equal layouts (docs/design/003-one-layout-torch-zip.md).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from holdfast.crc import crc32
from holdfast.errors import StateError
from holdfast.image.entries import REPLICATED, SPLIT, TEXT_MAX
from holdfast.image.regions import Region
from holdfast.wire.state_messages import HeldRegions
from holdfast.wire.state_union import Stage
from trainer_side.state.optimizer_places import settings
from trainer_side.state.per_rank import PerRank
from trainer_side.state.per_rank_blob import encode, reserve_bytes
from trainer_side.state.pickling import REFUSED, Pickling, explain_refusal
from trainer_side.state.split_tensor import HeldPart
from trainer_side.state.stages import is_sendable_in_place, outline
from trainer_side.state.stand_ins import PerRankStandIns, SplitStandIns
from trainer_side.state.survey import StoragePart, Survey, TensorSpec, survey
from trainer_side.state.tree import classify, tensor_paths

_COPIED_BYTES = 4096
_PIECE_BYTES = 32 << 20
_SMALL_BYTES = 1 << 20  # smaller tensors of a device are copied together


def checksums(found: Survey, leave_out: Collection[str]) -> tuple[int, ...]:
    """Return a checksum for each slot, in order; tied tensors are read once, those at the paths in `leave_out` not at
    all: theirs is 0.
    """
    by_view: dict[tuple[object, ...], int] = {}
    on_devices: dict[torch.device, dict[tuple[object, ...], torch.Tensor]] = {}
    for slot in found.specs:
        view = _view(slot)
        if slot.path in leave_out or view in by_view:
            continue
        memory = _memory_of(found.parts[slot.storage], slot)
        if isinstance(memory, torch.Tensor) and memory.device.type != "cpu":
            on_devices.setdefault(memory.device, {})[view] = memory
            by_view[view] = 0
        else:
            by_view[view] = _host_crc(memory)
    for tensors in on_devices.values():
        by_view.update(zip(tensors, device_crcs([*tensors.values()]), strict=True))
    return tuple(0 if slot.path in leave_out else by_view[_view(slot)] for slot in found.specs)


def _view(slot: TensorSpec) -> tuple[object, ...]:
    return (slot.storage, slot.dtype, slot.offset, slot.shape, slot.stride)


def _memory_of(part: StoragePart, slot: TensorSpec) -> torch.Tensor | tuple[int, int]:
    """Return where a tensor's bytes lie: address and size in host memory, else a one-dimensional uint8 tensor. A tensor
    with gaps is copied. Others are read in memory order: the strides are the same on every rank.
    """
    numbers = math.prod(slot.shape)
    if not numbers:
        return 0, 0
    dtype: torch.dtype = getattr(torch, slot.dtype)
    sizes, device = slot.shape, part.storage.device
    if 0 in slot.stride:  # memory holds the elements that `expand` repeats once
        sizes = tuple(size if stride else 1 for size, stride in zip(sizes, slot.stride, strict=True))
        numbers = math.prod(sizes)
    begin, nbytes = part.start_bytes + slot.offset * dtype.itemsize, numbers * dtype.itemsize
    if sum((size - 1) * stride for size, stride in zip(sizes, slot.stride, strict=True)) + 1 == numbers:
        if device.type == "cpu":
            return part.storage.data_ptr() + begin, nbytes
        return torch.empty(0, dtype=torch.uint8, device=device).set_(part.storage, begin, (nbytes,), (1,))
    tensor = torch.empty(0, dtype=dtype, device=device)
    tensor.set_(part.storage, begin // dtype.itemsize, sizes, slot.stride)
    return tensor.contiguous().view(-1).view(torch.uint8)


def _host_crc(memory: torch.Tensor | tuple[int, int]) -> int:
    address, nbytes = (memory.data_ptr(), memory.numel()) if isinstance(memory, torch.Tensor) else memory
    if nbytes <= _COPIED_BYTES:  # a copy is cheaper than a view
        return crc32(ctypes.string_at(address, nbytes)) if nbytes else 0
    return crc32(memoryview((ctypes.c_uint8 * nbytes).from_address(address)))


def device_crcs(memories: Sequence[torch.Tensor]) -> Iterator[int]:
    small = [memory for memory in memories if memory.numel() <= _SMALL_BYTES]
    crcs = _small_crcs(small)
    buffers = None
    for memory in memories:
        if memory.numel() <= _SMALL_BYTES:
            yield next(crcs)
            continue
        if buffers is None:
            pinned = memory.device.type == "cuda"
            buffers = [
                torch.empty(_PIECE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pinned)
                for _ in range(2)
            ]
        yield _large_crc(memory, buffers)


def _small_crcs(memories: Sequence[torch.Tensor]) -> Iterator[int]:
    """Yield the CRCs of small tensors, which are copied together, about a piece at a time."""
    batch: list[torch.Tensor] = []
    nbytes = 0
    for memory in memories:
        batch.append(memory)
        nbytes += memory.numel()
        if nbytes >= _PIECE_BYTES:
            yield from _batch_crcs(batch)
            batch, nbytes = [], 0
    yield from _batch_crcs(batch)


def _batch_crcs(batch: Sequence[torch.Tensor]) -> Iterator[int]:
    if not batch:
        return
    here, offset = torch.cat([*batch]).cpu().numpy().data, 0
    for memory in batch:
        yield crc32(here[offset : offset + memory.numel()])
        offset += memory.numel()


def _large_crc(memory: torch.Tensor, buffers: Sequence[torch.Tensor]) -> int:
    """Return the CRC of a large tensor: one piece is read while the next is copied."""
    size = buffers[0].numel()
    pieces = torch.split(memory, size)

    def copy_piece(place: int) -> torch.cuda.Event | None:
        buffers[place % 2][: pieces[place].numel()].copy_(pieces[place], non_blocking=True)
        return torch.cuda.current_stream(memory.device).record_event() if memory.is_cuda else None

    crc, under_way = 0, copy_piece(0)
    for place, piece in enumerate(pieces):
        arrived, under_way = under_way, copy_piece(place + 1) if place + 1 < len(pieces) else None
        if arrived is not None:
            arrived.synchronize()
        crc = crc32(buffers[place % 2].numpy().data[: piece.numel()], crc)
    return crc


class TensorTable(NamedTuple):
    """The table that the ranks compare before they plan."""

    # `[path, dtype, shape, owner]` of each tensor, in order. The dtype column also has unusual strides and a storage
    # shared with another tensor: replicas are only interchangeable if these agree, too.
    rows: list[list[Any]]
    digest: str
    pickle_bytes: int  # of data.pkl, without slack; 0 on ranks other than 0, unless they propose stages
    per_rank_bytes: dict[str, int]  # of each `PerRank` value on this rank, with slack
    sums: tuple[int, ...]  # for each row, the CRC-32 of all bytes of the tensor; empty in a job of one rank
    sum_seconds: float
    # The region that this rank holds of each split row; with stages, also of each row that lies in one piece.
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
    trailer_bytes: int = 0,
) -> TensorTable:
    """Make this rank's proposal. Training thread; reads every byte of the state once, moves none.

    `names`: Parameter names by optimizer, if the ranks have different tensors and propose stages. `sums`: Checksums
    from a table of the same tensors; computed if empty. `trailer_bytes`: Room that data.pkl needs beside the pickle.
    StateError: a tensor or plain value cannot be saved; names its path.
    """
    needed = {
        name: reserve_bytes(len(encode(value.snapshot(), name=name, trailer=value.names)))
        for name, value in tree.items()
        if isinstance(value, PerRank)
    }
    blobs = PerRankStandIns.of(ranks, needed)
    expanded = SplitStandIns().expand(blobs.expand(tree))
    full, held = expanded.tree, expanded.held
    found = survey(full)
    owned = blobs.with_ownership(classify(state, full))
    for slot in found.specs:
        _refuse_unwritable(slot.path)
    keys = {number: key for key, number in found.numbers.items()}
    blob_paths = blobs.paths
    rows: list[list[Any]] = [
        # Sizes of blobs may still differ: the ranks are just agreeing on them.
        [
            slot.path,
            *(("bytes", []) if slot.path in blob_paths else (found.description(slot), list(slot.shape))),
            SPLIT if slot.path in held and 0 not in slot.shape else owned[keys[slot.storage]].owner,
        ]
        for slot in found.specs
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
            if row not in regions and is_sendable_in_place(tensor):
                regions[row] = tensor.itemsize, Region((0,) * tensor.dim(), tuple(tensor.shape))
    try:
        is_pickled = rank == 0 or stage is not None
        pickle_bytes = len(Pickling(found).pickle(full)) + trailer_bytes if is_pickled else 0
    except REFUSED as error:
        raise explain_refusal(full, found, error) from error
    digest = hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()
    begun = time.perf_counter()
    if len(sums) != len(rows):
        sums = _row_checksums(found, blob_paths, held) if ranks > 1 else ()
    seconds = time.perf_counter() - begun
    here = HeldRegions.of((row, *regions[row]) for row in sorted(regions)) if regions else HeldRegions()
    return TensorTable(rows, digest, pickle_bytes, needed, tuple(sums), seconds, here, stage)


def _row_checksums(
    found: Survey, blob_paths: Collection[str], held: Mapping[str, HeldPart]
) -> tuple[int, ...]:
    """Return a checksum for each row; for a split tensor, that of the region on this rank."""
    whole = checksums(found, {*blob_paths, *held})
    if not held:
        return whole
    here = {path: part.local for path, part in held.items()}
    local = dict(zip(here, checksums(survey(here), ()), strict=True))
    return tuple(local.get(slot.path, crc) for slot, crc in zip(found.specs, whole, strict=True))


def _refuse_unwritable(path: str) -> None:
    """Refuse a path that layout and manifest cannot hold, on the rank that has it, before anything is sent."""
    if len(path) > TEXT_MAX:
        why = f"its path has {len(path)} characters, expected at most {TEXT_MAX}; shorten its keys"
    elif not path.isprintable() and any("\ud800" <= one <= "\udfff" for one in path):
        why = "a key of its path has half a surrogate pair, which is no text that a file can hold; rename it"
    else:
        return
    raise StateError(f"tensor {ascii(path[:80])[1:-1]}: {why}")


def describe_change(before: TensorTable, now: TensorTable) -> str:
    """Describe the first tensor that has changed, and count the others."""
    old, new = _describe_rows(before), _describe_rows(now)
    changes = [
        f"tensor {path}: {old[path]} before, {said} now"
        for path, said in new.items()
        if path in old and old[path] != said
    ]
    changes += [f"tensor {path} ({said}) is new" for path, said in new.items() if path not in old]
    changes += [f"tensor {path} ({said}) is gone" for path, said in old.items() if path not in new]
    if not changes:
        if [*old] != [*new]:
            return "its tensors come in another order"
        return "its tensors are as before, and its plan for them was given up; its log says why"
    return changes[0] + (f"; and {len(changes) - 1} more" if len(changes) > 1 else "")


def _describe_rows(table: TensorTable) -> dict[str, str]:
    held = {row: table.held.regions[number][1] for row, number in table.held.rows}
    return {str(row[0]): _describe_row(row, held.get(index)) for index, row in enumerate(table.rows)}


def _describe_row(row: list[Any], region: object) -> str:
    _, dtype, shape, owner = row
    kind = {REPLICATED: "replicated", SPLIT: f"split, {region} here"}.get(owner, f"of rank {owner}")
    return f"{dtype} {json.dumps(shape)}, {kind}"
