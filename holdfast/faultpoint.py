"""Named points in a checkpoint's life at which the environment can make this process die or stop.

    HOLDFAST_FAULT="rank:1@frame_sent#3=kill, flusher@part_written=stop"

Processes reach their points in every run, and only the environment decides what happens there, so tests kill the same
code that users run. `kill` sends SIGKILL to this process, `stop` SIGSTOP: the test can then kill any set of processes
while this one is stopped at the point. `#n` is the n-th time (default 1). Without the variable a point costs one
comparison.

A restarted process inherits the variable. With `HOLDFAST_FAULT_FIRED=DIRECTORY` each fault fires once, in the first
process that reaches it, which leaves a file there with its pid: `flusher@part_written#1`.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import ConfigError

VARIABLE = "HOLDFAST_FAULT"
FIRED_VARIABLE = "HOLDFAST_FAULT_FIRED"
_FAULT = re.compile(r"(rank:\d+|rank|stager|flusher|tool)@(\w+)(?:#(\d+))?=(kill|stop)")
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Point(StrEnum):
    """The fault points in the order of a checkpoint's life; a comment names the processes that reach each group."""

    SAVE_BEGUN = "save_begun"  # rank: in save(), nothing is captured or offered yet
    TENSOR_COPIED = "tensor_copied"  # rank: one tensor is in the staging buffer, others are not
    FRAME_SENT = "frame_sent"  # rank: a payload was handed to MPI, SENT was not
    SLICE_SENT = "slice_sent"  # rank: its whole slice was sent, DONE was not
    CHUNK_RECEIVED = "chunk_received"  # stager: a chunk is complete in its slot, the journal says FILLING
    CHUNK_FULL = "chunk_full"  # stager: the journal says FULL, the flusher is not told yet
    SEALED = "sealed"  # stager: every slice is in the ring, no record says so
    STAGED = "staged"  # stager: recorded as staged, neither flusher nor ranks are told yet
    DOUBT_HEARD = "doubt_heard"  # stager: a rank doubts steps, no record says so
    DOUBT_WRITTEN = "doubt_written"  # stager: the doubt is recorded, neither flusher nor ranks are told yet
    PROOF_WRITTEN = "proof_written"  # stager: the proof is beside the ring, the flusher is not told yet
    STAGED_HEARD = "staged_heard"  # flusher: was told that a checkpoint is staged
    # flusher: a full ring drops an older whole checkpoint: its file is gone, its slots are still FULL
    SUPERSEDED = "superseded"
    PART_BEGUN = "part_begun"  # flusher: is about to write a part to the store
    PART_WRITTEN = "part_written"  # flusher: the store has the part, the ring's record does not say so
    PART_RECORDED = "part_recorded"  # flusher: the part is recorded, its slots are not free yet
    SHARES_BEGUN = "shares_begun"  # leading flusher: the others may join its upload
    CRCS_PUT = "crcs_put"  # flusher of several: the others know the CRCs of its entries
    SHARE_SEALED = "share_sealed"  # flusher of several: its share is written and sealed, nobody is told yet
    ALL_SEALED = "all_sealed"  # leading flusher: has seen all seals, published nothing
    PARTS_DONE = "parts_done"  # flusher: all parts are written, nothing is published
    # flusher: has checked its claim, and is about to name, list, mark or remove something in the run
    CLAIM_SEEN = "claim_seen"
    FILE_NAMED = "file_named"  # flusher: the file has its name, which may not be durable yet
    FILE_PUBLISHED = "file_published"  # flusher: the file is in place, its manifest is not
    MANIFEST_WRITTEN = "manifest_written"  # flusher: the manifest is durable, nobody is told yet
    PROOF_HEARD = "proof_heard"  # flusher: the checkpoint is published, its proof is not
    DOUBT_MARKED = "doubt_marked"  # flusher: one manifest is marked as doubtful, others may not be
    VERIFYING = "verifying"  # flusher: in the middle of a read-back
    MANIFEST_DELETED = "manifest_deleted"  # flusher: retention has removed a manifest, not yet its file
    FILE_RETIRED = "file_retired"  # flusher: a file that is no longer kept is renamed to be reused
    ROOM_TAKEN = "room_taken"  # flusher: the next upload has that file, and has written nothing
    RECOVERING = "recovering"  # flusher: has found a dead flusher's ring, done nothing yet
    RING_TAKEN = "ring_taken"  # flusher: the ring's file is longer, its journal does not say so
    RING_ADDED = "ring_added"  # flusher: the journal has the new slots, the stager is not told yet
    GROWTH_HEARD = "growth_heard"  # stager: knows of the new slots, has mapped none
    IMAGE_NAMED = "image_named"  # tool: the file of an image is in place, its manifest is not
    REJOINED = "rejoined"  # rank: a stager has welcomed it again, the rank has sent nothing yet
    RESTORE_READ = "restore_read"  # rank: has read a part of the checkpoint to restore
    RING_SEEN = "ring_seen"  # rank: has checked which chunk a ring slot holds, copied nothing
    SLOT_RECYCLED = "slot_recycled"  # rank: is about to reuse a slot, the record still names the old slice
    SLOT_UNSEALED = "slot_unsealed"  # rank: the record no longer names the old slice, nothing is overwritten
    SLOT_WRITTEN = "slot_written"  # rank: one frame is in its slot, others are not
    SLOT_SEALED = "slot_sealed"  # rank: the seal is behind its slice, neither is durable
    SLOT_FLUSHED = "slot_flushed"  # rank: seal and slice are durable, no record names them
    SLOT_RECORDED = "slot_recorded"  # rank: a commit sector is written, and not durable
    SLOT_COMMITTED = "slot_committed"  # rank: the commit sector is durable, nobody is told yet
    PROOF_DUE = "proof_due"  # rank: a slice is sealed, its proof is not written


class Fault(NamedTuple):
    """One armed point: `victim` is `rank:N`, `rank` (any), `stager`, `flusher` or `tool`."""

    victim: str
    point: Point
    number: int
    action: str

    @property
    def name(self) -> str:
        return f"{self.victim}@{self.point}#{self.number}"


def parse_faults(text: str) -> list[Fault]:
    """Parse comma-separated `VICTIM@POINT[#N]=kill|stop`. Raises `ConfigError`: the wrong part, and what is allowed."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _FAULT.fullmatch(part)
        if match is None or match[2] not in set(Point) or match[3] == "0":
            raise ConfigError(
                f"{VARIABLE}: {part!r}: expected VICTIM@POINT[#N]=kill or =stop, VICTIM one of rank:N, rank, stager, "
                f"flusher, tool, POINT one of {', '.join(Point)}"
            )
        found.append(Fault(match[1], Point(match[2]), int(match[3] or 1), match[4]))
    return found


_armed: dict[Point, list[Fault]] = {}
# Counters that are atomic under the GIL: several threads reach points.
_reached: dict[Point, itertools.count[int]] = {}


def identify(victim: str) -> None:
    """Name this process (`rank:1`, `stager`, `flusher`) and read its faults from `HOLDFAST_FAULT`. Once, at start."""
    _armed.clear()
    for fault in parse_faults(os.environ.get(VARIABLE, "")):
        if fault.victim in {victim, victim.partition(":")[0]}:
            _armed.setdefault(fault.point, []).append(fault)
    _reached.clear()
    _reached.update({point: itertools.count(1) for point in _armed})


def reach(point: Point, times: int = 1) -> None:
    """Note that this process reaches `point`, `times` times. From any thread."""
    if not _armed or point not in _armed:
        return
    for _ in range(times):
        number = next(_reached[point])
        for fault in _armed[point]:
            if fault.number == number and _is_first(fault):
                # To this thread: another thread might receive a process signal, and this one would run on for a while.
                signal.pthread_kill(threading.get_ident(), _SIGNALS[fault.action])


def _is_first(fault: Fault) -> bool:
    directory = os.environ.get(FIRED_VARIABLE)
    if not directory:
        return True
    try:
        fd = os.open(Path(directory) / fault.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return False
    os.write(fd, f"{os.getpid()}\n".encode())
    os.close(fd)
    return True
