"""A rank of a new job reads the previous job's steps from the ring, through the product's code; all bytes are compared.

recalled   every byte from the ring belongs to the step that the ring names, or its CRC shows that it does not
not lost   a step that was staged and is not in the store is whole in the ring, unless its flusher never came
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from holdfast.checkpoints.catalog import Catalog
from holdfast.errors import DamageError, HoldfastError, StoreError
from holdfast.image.index import LayoutIndex
from holdfast.image.slices import frames_of
from holdfast.ring.remains import FetchKind, held_checkpoints
from holdfast.ring.ring import Ring
from tests.simulation.store import pristine
from tests.simulation.transport import Job
from trainer_side.ranks.peers import LonePeers
from trainer_side.restore.choice import StoreCandidate
from trainer_side.restore.ring_slices import RingSlices, fetch_ring_contents
from trainer_side.tiers.tier import SealedSlice

if TYPE_CHECKING:
    from tests.simulation.world import World
    from trainer_side.link.link import Link

__all__ = ["check_remains", "reread", "restored_from_ring"]


def restored_from_ring(world: World, job: Job, link: Link) -> tuple[RingSlices, list[SealedSlice]]:
    """Read the ring as a restore does, between WELCOME and the first step; compare every byte."""
    checks, answered = world.checks, True
    before = [key for key in checks.promised if key[0] < link.job.attempt]

    def fetch(fetch_kind: FetchKind, **question: Any) -> bytes | None:
        nonlocal answered
        if fetch_kind is FetchKind.PLACE and link.job.attempt % 2:
            return None  # as a rank on another machine
        try:
            return link.fetch(fetch_kind, **question)
        except HoldfastError:
            answered = False
            raise

    seen = fetch_ring_contents(fetch, LonePeers())
    ring = seen.staged_slices(_stored(world), LonePeers())
    kept = ring.kept_slices()
    for one in kept:
        _read(world, ring, one, may_be_gone=job is not world.jobs[-1])
    whole = {(one.seal.attempt, one.seal.step) for one in kept if not one.absent}
    partly = {(one.seal.attempt, one.seal.step) for one in kept if one.absent}
    waited = _waited(world, job)
    for key in before:
        if key in whole - partly or key in checks.durable or key in checks.tainted or key in checks.excused:
            continue
        if answered and not waited and key in checks.promised and key[0] in checks.job_of_attempt:
            checks.broken(
                f"step {key[1]} (attempt {key[0]}) was staged, and a restore finds it neither in ring nor store"
            )
    return ring, kept


def reread(world: World, ring: RingSlices, kept: Sequence[SealedSlice]) -> None:
    """Read one of these slices once more, while other steps take its slots."""
    if kept:
        _read(world, ring, world.scheduler.chance.choice(kept), may_be_gone=True)


def check_remains(world: World, ring: Ring) -> None:
    """Check that each record that counts as whole, of any checkpoint, staged or not, matches the bytes in its slot."""
    checks, plan = world.checks, world.plan
    for held in held_checkpoints(ring):
        job = checks.job_of_attempt.get(held.attempt)
        made = None if job is None else world.images.get((job, held.step))
        if made is None or (held.attempt, held.step) in checks.tainted:
            continue
        fields = LayoutIndex(made.layout).fields
        for chunk, record in held.chunks.items():
            if list(record.sources) != made.sources(chunk):
                checks.broken(f"slot {record.slot}: not the CRCs of step {held.step}, chunk {chunk}: {plan}")
            found = bytearray(ring.slot_memory(record.slot)[: record.nbytes])
            for offset, nbytes in fields[chunk].extents():
                found[offset : offset + nbytes] = bytes(nbytes)
            if found != made.chunk_bytes(chunk):
                checks.broken(f"slot {record.slot}: not the bytes of step {held.step}, chunk {chunk}")


def _stored(world: World) -> list[StoreCandidate]:
    rows = []
    for number, item in enumerate(Catalog(pristine(world.store)).list()):
        if item.manifest is not None:
            m = item.manifest
            rows.append(StoreCandidate(number, m.attempt, m.step, m.ranks, m.layout_digest, item.fault))
    return rows


def _read(world: World, ring: RingSlices, one: SealedSlice, *, may_be_gone: bool = False) -> None:
    checks, seal = world.checks, one.seal
    key = (seal.attempt, seal.step)
    for frame, crc in zip(frames_of(one.layout, seal.rank), seal.frame_crc32s, strict=True):
        if frame.chunk in one.absent:
            continue
        data = bytearray(frame.nbytes)
        try:
            ring.read_into(one, frame.offset, memoryview(data))
        except StoreError:
            return  # the stager is gone
        except DamageError:
            # With the run taken over, its flusher removes the ring.
            if not may_be_gone and not world.node_lost and world.intruder is None:
                checks.broken(f"chunk {frame.chunk} of step {seal.step} went from the ring before any save")
            return
        if zlib.crc32(data) != crc:
            if key not in checks.tainted:
                checks.broken(
                    f"chunk {frame.chunk} of step {seal.step} was recalled with a CRC that does not hold"
                )
            continue
        job = checks.job_of_attempt.get(seal.attempt)
        made = None if job is None else world.images[job, seal.step]
        if made is not None and bytes(data) != made.frame(frame.chunk, seal.rank):
            checks.broken(f"chunk {frame.chunk} was recalled as one of step {seal.step}, and is of another")


def _waited(world: World, job: Job) -> bool:
    """Whether the stager has waited for the flusher as long as it may: then its answer is final."""
    service = job.stager.notes.get("service") if job.stager is not None else None
    if service is None:
        return True
    previous_jobs = service._rank_handler._previous_jobs
    first = previous_jobs._waiting_since
    return first is not None and world.scheduler.now - first >= previous_jobs._seconds_max
