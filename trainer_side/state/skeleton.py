"""The skeleton: the file that `torch.save` would write, with holes where the tensors go.

    plan, once per set of tensors                           capture, every save
    ──────────────────────────────────────────────────      ────────────────────────────────────────────
    survey the tree: tensors, their storages, the part      do the tensors still fit? recall the last capture, or
      of each storage that is used                            survey again; a new data.pkl (rank 0), padded, now
                                                              or later of a snapshot
    torch.save(skip_data) ─► literals and holes             new PerRank blobs, padded to theirs
    read the zip's structure ─► Layout, CRC fields          where each storage lies now
    torch.load(weights_only) of it: would it be accepted?

torch itself writes pickle and zip. Our pickler replaces each storage by a `meta` stand-in of the used size, marked as
`cpu`: ties stay tied, a view does not drag its whole storage along, and the file loads anywhere without `map_location`.
Zeros after the pickle fill data.pkl up to its reserve, so that the layout stays the same while plain values grow; every
reader stops at the pickle's own end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from holdfast.errors import StateError
from holdfast.image.entries import Extent
from holdfast.image.layout import Layout
from holdfast.wire.state_messages import Agreement
from trainer_side.state.per_rank import PerRank
from trainer_side.state.per_rank_blob import encode
from trainer_side.state.pickling import REFUSED, Pickling, explain_refusal, load_structure
from trainer_side.state.position_names import pad_pickle
from trainer_side.state.recall import LastPickle, Recall, Snapshot
from trainer_side.state.sparse_file import Literals, SparseFile, ZipParts
from trainer_side.state.stages import Stages
from trainer_side.state.stand_ins import ExpandedTree, PerRankStandIns, SplitStandIns
from trainer_side.state.survey import StorageSource, Survey, survey
from trainer_side.state.tree import Ownership, resolve_pending, tensor_paths


class Outgrown(StateError):
    """A value no longer fits the room that was agreed for it."""

    def __init__(self, name: str, needed_bytes: int, reserve: int) -> None:
        what = f"{name}: the PerRank value takes" if name else "the plain values of the state take"
        then = "keep its size bounded, or restart" if name else "the next checkpoint gets more room"
        super().__init__(f"{what} {needed_bytes} bytes, {reserve} were set aside; {then}")
        self.name = name  # empty for data.pkl, otherwise that of the `PerRank` value
        self.needed_bytes = needed_bytes  # its size now, without slack


@dataclass(frozen=True)
class Skeleton:
    """A plan for all checkpoints with the same tensors, made by `plan`. Immutable and readable from any thread, except
    for the recalls of `capture`, which belong to the training thread.
    """

    layout: Layout  # the same on every rank, like `literals`
    literals: Literals  # all bytes of the image outside the entries, CRC fields as zeros
    gated: tuple[bool, ...]  # per entry of the layout, whether it is copied behind the gate
    rank: int
    signature: tuple[Any, ...]  # of the tensors that the plan is for
    zip_parts: ZipParts
    _blobs: PerRankStandIns
    _stages: Stages | None
    _shards: SplitStandIns | None  # None: nothing is split
    _shard_entries: Mapping[int, int]  # address of a stand-in's storage → entry
    _blob_entries: Mapping[str, list[int]]
    _accepted: set[Any]  # classes of values that weights_only is known to accept
    _recalls: list[Recall]  # the newest, if any; training thread

    @property
    def pickle_reserve_bytes(self) -> int:
        return self.layout.entries[self.zip_parts.pickle_entry].nbytes

    def write_literals(self, extent: Extent, out: memoryview) -> None:
        """Copy the literals of a part of the image into `out`; leave the bytes of entries as they are."""
        self.literals.write(extent.offset, out[: extent.nbytes])


class DeferredPickle:
    """A data.pkl that any thread makes later, once, of a `snapshot` of the tree, which the `recall` has recognised. A
    failed pickle invalidates the recall, so the next capture is a full one.
    """

    def __init__(self, recall: Recall, snapshot: Snapshot, skeleton: Skeleton, trailer: bytes) -> None:
        self._recall, self._snapshot, self._skeleton, self._trailer = recall, snapshot, skeleton, trailer

    @property
    def fits(self) -> bool:
        """Whether the pickle will fit, estimated from the last pickle's size and the growth of text since then."""
        last = self._recall.last_pickle
        longer = max(0, self._snapshot.text_length - last.text_length)
        more_bytes = longer * _CHARACTER_BYTES_MAX + _GROWTH_BYTES
        return last.pickle_bytes + more_bytes + len(self._trailer) <= self._skeleton.pickle_reserve_bytes

    def contents(self) -> dict[int, bytes]:
        """Make the data.pkl that `Capture.contents` lacks.

        Outgrown: data.pkl does not fit. StateError: the snapshot cannot be pickled; a full capture says why.
        """
        recall, skeleton = self._recall, self._skeleton
        pickled = recall.pickle_snapshot(self._snapshot)
        if pickled is None or not pickled[1] <= skeleton._accepted:
            recall.is_valid = False
            raise StateError(
                "the plain values of the state cannot be pickled any more; the next save says why"
            )
        data, reserve = pickled[0], skeleton.pickle_reserve_bytes
        if len(data) + len(self._trailer) > reserve:
            recall.is_valid = False
            raise Outgrown("", len(data) + len(self._trailer), reserve)
        recall.last_pickle = LastPickle(len(data), self._snapshot.text_length)
        return {skeleton.zip_parts.pickle_entry: pad_pickle(data, self._trailer, reserve)}


class Capture(NamedTuple):
    """One checkpoint's contents. `sources` are live: copy gated ones before the gate opens, the others at once."""

    # Per entry of the layout; None: `contents` or another rank has the bytes.
    sources: list[StorageSource | None]
    # By entry: data.pkl and the serialization id (rank 0), this rank's `PerRank` values.
    contents: dict[int, bytes]
    deferred: DeferredPickle | None  # makes the bytes of data.pkl if `contents` lacks them
    signature: tuple[Any, ...]
    # All tensors of the tree; torch counts in-place changes in each, or in the tensor that it was detached from.
    tensors: list[torch.Tensor]
    tensor_entries: Sequence[int]  # the entry of the layout for each tensor


def plan(
    tree: Mapping[str, Any],
    classes: Mapping[int, Ownership],
    *,
    rank: int,
    ranks: int,
    chunk_bytes: int,
    agreed: Agreement,
    trailer: bytes = b"",
) -> Skeleton:
    """Lay out the image. Ranks that hold the same tensors get the same layout and the same literals. Training thread;
    moves no tensor bytes.

    `agreed`: The room for data.pkl and for each `PerRank` value, and how tensors are split. Outgrown: on rank 0,
    data.pkl does not fit its reserve. StateError: a value cannot be saved, or not be loaded with `weights_only=True`;
    names its path.
    """
    per_rank_reserve_bytes, pickle_reserve_bytes = agreed.per_rank_reserve_bytes, agreed.pickle_reserve_bytes
    marked = sorted(name for name, value in tree.items() if isinstance(value, PerRank))
    if marked != sorted(per_rank_reserve_bytes):
        raise StateError(
            f"this rank has the PerRank values {marked}, the ranks agreed on {sorted(per_rank_reserve_bytes)}"
        )
    blobs = PerRankStandIns.of(ranks, per_rank_reserve_bytes)
    shards = SplitStandIns()
    stages = None if agreed.union is None else Stages(agreed.union, rank)
    united = blobs.expand(tree) if stages is None else stages.fill(blobs.expand(tree))
    if united is None:
        raise StateError("the tensors of this rank are not those that the ranks have agreed on; save again")
    expanded = shards.expand(united)
    full = expanded.tree
    found = survey(full)
    if stages is not None and [slot.path for slot in found.specs] != stages.paths:
        raise StateError(
            "the tensors of this rank are in another order than the ranks have agreed on; save again"
        )
    image, job, pickled, fits = SparseFile(), Pickling(found), b"", True

    def pad(whole: bytes) -> bytes:
        nonlocal pickled, fits
        pickled, fits = whole, len(whole) + len(trailer) <= pickle_reserve_bytes
        if not fits and rank == 0:
            raise Outgrown("", len(whole) + len(trailer), pickle_reserve_bytes)
        # Other ranks do not send their pickle: only its size matters.
        return whole[:pickle_reserve_bytes].ljust(pickle_reserve_bytes, b"\0")

    try:
        job.save(full, image, pad)
        if fits:
            load_structure(image)
    except REFUSED as error:
        raise explain_refusal(full, found, error) from error
    patterns = {found.specs[row].path: number for row, number in agreed.split_rows}
    owned = shards.with_ownership(blobs.with_ownership(classes), expanded, patterns)
    parts = ZipParts.of(image, found, owned)
    blob_entries = blobs.entries(found.numbers, parts.storage_entries)
    # This recall saves the first save a second survey and pickling.
    shard_entries = {storage: parts.storage_entries[found.numbers[storage]] for storage in shards.storages}
    recall = Recall.of(
        full,
        found,
        parts.storage_entries,
        leave_out={entry for entries in blob_entries.values() for entry in entries},
        stand_ins=set(shard_entries.values()),
        pickled=(job, pickled) if rank == 0 else None,
    )
    layout = Layout(
        image.nbytes, chunk_bytes, ranks, parts.entries, parts.tensors(found), patterns=agreed.patterns
    )
    crcs = {crc_field: 0 for entry in layout.entries for crc_field in entry.crc_fields}
    holes = [(entry.offset, entry.end) for entry in layout.entries]
    return Skeleton(
        layout=layout,
        literals=image.literals.with_holes(holes, {**crcs, **parts.constant_crcs}),
        gated=parts.gated,
        rank=rank,
        signature=found.signature,
        zip_parts=parts,
        _blobs=blobs,
        _stages=stages,
        _shards=shards or None,
        _shard_entries=shard_entries,
        _blob_entries=blob_entries,
        _accepted=job.kinds,
        _recalls=[] if recall is None else [recall],
    )


def capture(
    tree: Mapping[str, Any], skeleton: Skeleton, *, defer: bool = False, trailer: bytes = b""
) -> Capture | None:
    """Take the cheap step of every save: make the small contents, point to the large ones. Training thread.

    None if the tensors no longer fit the plan: make a new one. `defer`: data.pkl may be made later, if the tree is
    recalled, a snapshot can hold all of it, and the pickle cannot be much longer than the last one. `trailer`: The last
    bytes of data.pkl (`position_names.py`); on rank 0. Outgrown: a value no longer fits its room. StateError: a plain
    value cannot be saved; names it.
    """
    blobs, parts = skeleton._blobs, skeleton.zip_parts
    per_rank = {name: value for name, value in tree.items() if isinstance(value, PerRank)}
    if per_rank.keys() != blobs.by_name.keys():
        return None
    shards, stages = skeleton._shards, skeleton._stages
    united = blobs.expand(tree) if per_rank else tree
    if stages is not None:
        filled = stages.fill(united)
        if filled is None:
            return None
        united = filled
    expanded = ExpandedTree(united, {}) if shards is None else shards.expand_again(united)
    if expanded is None:
        return None
    full = expanded.tree
    found = _capture_by_recall(full, skeleton, defer=defer, trailer=trailer) or _capture_in_full(
        full, skeleton, trailer
    )
    if found is None:
        return None
    sources, data_pkl, tensors, tensor_entries = found
    if shards is not None:
        tensors = shards.live_tensors(expanded, tensors)
        for entry, source in shards.sources(expanded, skeleton._shard_entries).items():
            sources[entry] = source
    contents = _own_blobs(per_rank, skeleton)
    deferred = data_pkl if isinstance(data_pkl, DeferredPickle) else None
    if isinstance(data_pkl, bytes):
        contents[parts.pickle_entry] = data_pkl
    if data_pkl is not None:
        contents[parts.serialization_id_entry] = parts.serialization_id
    return Capture(sources, contents, deferred, skeleton.signature, tensors, tensor_entries)


def _own_blobs(per_rank: Mapping[str, PerRank], skeleton: Skeleton) -> dict[int, bytes]:
    """Encode this rank's `PerRank` values; by entry."""
    blobs: dict[int, bytes] = {}
    for name, entries in skeleton._blob_entries.items():
        entry = entries[skeleton.rank]
        reserve = skeleton.layout.entries[entry].nbytes
        blob = encode(per_rank[name].snapshot(), name=name, trailer=per_rank[name].names)
        if len(blob) > reserve:
            raise Outgrown(name, len(blob), reserve)
        blobs[entry] = blob.ljust(reserve, b"\0")
    return blobs


class _CapturedTree(NamedTuple):
    """The tensors of a capture and, on rank 0, the padded data.pkl."""

    sources: list[StorageSource | None]
    data_pkl: bytes | DeferredPickle | None
    tensors: list[torch.Tensor]
    tensor_entries: Sequence[int]


_GROWTH_BYTES = 1024  # ample for numbers: one that gets longer takes a few bytes more
_CHARACTER_BYTES_MAX = 4  # in UTF-8


def _capture_by_recall(
    full: Mapping[str, Any], skeleton: Skeleton, *, defer: bool, trailer: bytes
) -> _CapturedTree | None:
    """Return the result of `_capture_in_full`, if only values have changed since its last call; else None."""
    for recall in skeleton._recalls:
        seen = recall.recognise(full)
        if seen is None:
            return None
        sources = recall.sources(seen, len(skeleton.layout.entries))
        tensors = seen.contents.tensors
        if skeleton.rank != 0:
            return _CapturedTree(sources, None, tensors, recall.entries)
        snapshot = recall.snapshot(full, seen.contents) if defer else None
        if snapshot is not None and (deferred := DeferredPickle(recall, snapshot, skeleton, trailer)).fits:
            return _CapturedTree(sources, deferred, tensors, recall.entries)
        data, kinds = recall.pickle(full, seen.contents) or (b"", None)
        reserve = skeleton.pickle_reserve_bytes
        if kinds is not None and len(data) + len(trailer) <= reserve and kinds <= skeleton._accepted:
            if snapshot is not None:
                recall.last_pickle = LastPickle(len(data), snapshot.text_length)
            return _CapturedTree(sources, pad_pickle(data, trailer, reserve), tensors, recall.entries)
    return None


def _capture_in_full(full: Mapping[str, Any], skeleton: Skeleton, trailer: bytes) -> _CapturedTree | None:
    """Survey and pickle; None if the tensors are not those of the plan."""
    zip_parts = skeleton.zip_parts
    skeleton._recalls.clear()
    resolve_pending(full)
    if SplitStandIns.has_split(full):
        return None
    found = survey(full)
    if found.signature != skeleton.signature:
        return None
    blob_entries = {entry for entries in skeleton._blob_entries.values() for entry in entries}
    sources: list[StorageSource | None] = [None] * len(skeleton.layout.entries)
    for number, part in enumerate(found.parts):
        entry = zip_parts.storage_entries[number]
        if entry not in blob_entries:
            sources[entry] = part.source(entry)
    pickled = _pickle_checked(full, found, skeleton, len(trailer)) if skeleton.rank == 0 else None
    recall = Recall.of(
        full,
        found,
        zip_parts.storage_entries,
        leave_out=blob_entries,
        stand_ins=set(skeleton._shard_entries.values()),
        pickled=pickled,
    )
    if recall is not None:
        skeleton._recalls.append(recall)
    tensors = [named.tensor for named in tensor_paths(full)]
    numbers = [found.number(tensor) for tensor in tensors]
    entries = [zip_parts.storage_entries[number] for number in numbers if number is not None]
    assert len(entries) == len(tensors), "all tensors were surveyed"
    data_pkl = None if pickled is None else pad_pickle(pickled[1], trailer, skeleton.pickle_reserve_bytes)
    return _CapturedTree(sources, data_pkl, tensors, entries)


def _pickle_checked(
    full: Mapping[str, Any], found: Survey, skeleton: Skeleton, trailer_bytes: int
) -> tuple[Pickling, bytes]:
    """Pickle the tree for this save, and make sure that torch.load accepts the pickle."""
    job = Pickling(found)
    entry = skeleton.layout.entries[skeleton.zip_parts.pickle_entry]
    try:
        pickled = job.pickle(full)
    except REFUSED as error:
        raise explain_refusal(full, found, error) from error
    if len(pickled) + trailer_bytes > entry.nbytes:
        raise Outgrown("", len(pickled) + trailer_bytes, entry.nbytes)
    if not job.kinds <= skeleton._accepted:
        # A class of values that the plan has not seen: check again that torch.load accepts it.
        padded = entry.offset, pickled.ljust(entry.nbytes, b"\0")
        try:
            load_structure(SparseFile.of(skeleton.literals, skeleton.layout.image_bytes, padded))
        except REFUSED as error:
            raise explain_refusal(full, found, error) from error
        skeleton._accepted.update(job.kinds)
    return job, pickled
