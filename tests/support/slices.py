"""Checkpoints as slices of several ranks, made by the real skeletons; and a tier that keeps them in a dict.

For tests of restore that set where slices lie, damaged or lost. Tests of tiers themselves use the real ones.
"""

from __future__ import annotations

import mmap
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.errors import DamageError, StoreError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.layout import Layout
from holdfast.image.manifest import EntryRecord, Manifest, TensorRecord, manifest_name, step_file_name
from holdfast.image.slices import SliceSeal, area_bytes, frames_of
from holdfast.ring.doubts import DoubtedSteps, doubt_about
from tests.support.checkpoints import manifest_of
from tests.unit.trainer_side.assemble import assembled, make_plan, sent, taken
from trainer_side.tiers.tier import Nearness, SealedSlice, Tier

__all__ = ["Checkpoint", "DictTier", "checkpoint", "keep"]


@dataclass(frozen=True)
class Checkpoint:
    """The slices of all ranks for one step."""

    attempt: int
    step: int
    layout: Layout
    frames: Sequence[Mapping[int, bytes]]  # per rank: image offset to bytes, CRC fields zero
    job: str = ""

    def area(self, rank: int) -> bytearray:
        """The slice of a rank as a tier keeps it: frames on pages."""
        area = bytearray(area_bytes(self.layout, rank))
        for frame in frames_of(self.layout, rank):
            data = b"".join(self.frames[rank][extent.offset] for extent in frame.extents)
            area[frame.offset : frame.offset + frame.nbytes] = data
        return area

    def seal(self, rank: int) -> SliceSeal:
        """The seal of a rank's slice."""
        area = self.area(rank)
        return SliceSeal(
            run="run",
            attempt=self.attempt,
            step=self.step,
            rank=rank,
            ranks=self.layout.ranks,
            layout_digest=self.layout.digest,
            frame_crc32s=tuple(
                zlib.crc32(area[frame.offset : frame.offset + frame.nbytes])
                for frame in frames_of(self.layout, rank)
            ),
            record={"job": self.job},
        )

    def image(self) -> bytes:
        """The portable file."""
        return assembled(self.layout, self.frames)

    def publish(self, root: Path) -> Manifest:
        """Put file and manifest into a directory, as the flusher would."""
        image = self.image()
        name = step_file_name(self.step, attempt=self.attempt if self.attempt > 1 else 0)
        manifest = manifest_of(
            image,
            step=self.step,
            attempt=self.attempt,
            file=name,
            chunk_bytes=self.layout.chunk_bytes,
            ranks=self.layout.ranks,
            layout_digest=self.layout.digest,
        )
        entries = tuple(
            EntryRecord(
                name=e.name, offset=e.offset, nbytes=e.nbytes, crc32=zlib.crc32(image[e.offset : e.end])
            )
            for e in self.layout.entries
        )
        tensors = tuple(
            TensorRecord(path=t.path, dtype=t.dtype, shape=t.shape, entry=t.entry)
            for t in self.layout.tensors
        )
        manifest = manifest.model_copy(update={"entries": entries, "tensors": tensors})
        root.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(image)
        (root / manifest_name(name)).write_bytes(manifest.to_bytes())
        return manifest


def checkpoint(
    state_of: Callable[[int], Mapping[str, Any]],
    *,
    ranks: int,
    step: int,
    attempt: int = 1,
    chunk_bytes: int = 4096,
    job: str = "",
) -> Checkpoint:
    """Make the checkpoint of `ranks` ranks; each saves its share of `state_of(rank)`."""
    frames = []
    for rank in range(ranks):
        state = state_of(rank)
        skeleton = make_plan(state, rank=rank, ranks=ranks, chunk_bytes=chunk_bytes, reserve=1 << 14)
        frames.append(sent(skeleton, taken(state, skeleton)))
    return Checkpoint(attempt, step, skeleton.layout, frames, job)


def keep(tier: Tier, saved: Checkpoint, rank: int, *, complete: bool = True) -> None:
    """Write the slice of a rank into a real tier, frame by frame, as the Checkpointer does."""
    tier.prepare(saved.layout, rank)
    writer = tier.begin(saved.attempt, saved.step)
    assert writer is not None, f"no slot for {saved.attempt}, {saved.step}"
    area = saved.area(rank)
    memory = writer.memory if writer.memory is not None else memoryview(mmap.mmap(-1, max(4096, len(area))))
    memory[: len(area)] = area
    for number, (frame, crc) in enumerate(
        zip(frames_of(saved.layout, rank), saved.seal(rank).frame_crc32s, strict=True)
    ):
        writer.write(number, memory[frame.offset : frame.offset + frame.padded_bytes], crc)
    assert writer.seal({"job": saved.job})
    if complete:
        tier.complete(saved.attempt, saved.step)


class DictTier(Tier):
    """Keeps slices as bytes; implements only the calls that restore makes.

    Attributes:
        areas: Slot → the slice's bytes, for tests to alter.
        reads: Offset and bytes of each read that was answered, with the step.
        fails: Raised by every read after the first `good_reads`, if set; `kept_fails` by `kept_slices`.
        failed_reads: How many reads raised it.
    """

    write_mode, writers = "a dict", 1

    def __init__(self, nearness: Nearness = Nearness.MEMORY, name: str = "") -> None:
        self.nearness = nearness
        self.name = name or f"{nearness}:test"
        self.areas: dict[int, bytearray] = {}
        self.reads: list[tuple[int, int, int]] = []
        self.fails: Exception | None = None
        self.good_reads = self.failed_reads = 0
        self.kept_fails: StoreError | None = None
        self._kept: list[SealedSlice] = []
        self._lock = threading.Lock()

    def put(self, saved: Checkpoint, *ranks: int) -> DictTier:
        """Keep the slices of these ranks; returns itself."""
        for rank in ranks:
            slot = len(self._kept)
            self._kept.append(SealedSlice(saved.seal(rank), saved.layout, "dict", slot))
            self.areas[slot] = saved.area(rank)
        return self

    def slot(self, step: int, rank: int) -> int:
        """The slot of a rank's slice."""
        return next(k.slot for k in self._kept if (k.seal.step, k.seal.rank) == (step, rank))

    def flip(self, step: int, rank: int, offset: int) -> None:
        """Flip a bit of a slice."""
        self.areas[self.slot(step, rank)][offset] ^= 16

    @property
    def bytes_read(self) -> int:
        """Sum over all reads."""
        return sum(nbytes for _, _, nbytes in self.reads)

    def record_doubt(self, steps: DoubtedSteps) -> None:
        self._kept = [
            replace(one, doubt=doubt_about([steps], CheckpointId(*one.seal.order)) or one.doubt)
            for one in self._kept
        ]

    def kept_slices(self) -> list[SealedSlice]:
        if self.kept_fails is not None:
            raise self.kept_fails
        return sorted(self._kept, key=lambda kept: kept.seal.order, reverse=True)

    def read_into(self, kept: SealedSlice, offset: int, view: memoryview) -> None:
        if self.fails is not None and len(self.reads) >= self.good_reads:
            self.failed_reads += 1
            raise self.fails
        area = self.areas[kept.slot]
        if offset + view.nbytes > len(area):
            raise DamageError(f"{self.name}: slot {kept.slot} ends at {len(area)}")
        view[:] = area[offset : offset + view.nbytes]
        with self._lock:
            self.reads.append((kept.seal.step, offset, view.nbytes))

    def prepare(self, layout: Layout, rank: int) -> None:
        raise NotImplementedError

    def memories(self) -> tuple[memoryview, ...]:
        return ()

    def begin(self, attempt: int, step: int) -> None:
        raise NotImplementedError

    def complete(self, attempt: int, step: int) -> None:
        raise NotImplementedError

    def void(self, attempt: int, step: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to release."""
