"""Named points in a checkpoint's life at which this process can be made to die, or to stand still, from outside.

    HOLDFAST_FAULT="rank:1@frame_sent#3=kill, flusher@part_written=stop"

Every process reaches its points in every run; what happens there is decided by the environment alone, so the code that
is killed is the code that people run. `kill` is SIGKILL to this process, `stop` is SIGSTOP: then whoever drives the
experiment kills any set of processes while this one stands exactly there. `#n` is the n-th time (default 1). Without
the variable a point costs one comparison.

A process that is started again inherits the variable. With `HOLDFAST_FAULT_FIRED=DIRECTORY` each fault strikes once, in
whichever process comes there first, and leaves a file there that says so: `flusher@part_written#1`, with its pid.
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
    FRAME_SENT = "frame_sent"  # rank: a payload was given to MPI, SENT was not
    SLICE_SENT = "slice_sent"  # rank: its whole slice has left, DONE has not
    CHUNK_RECEIVED = "chunk_received"  # stager: a chunk is complete in its slot, the journal says FILLING
    CHUNK_FULL = "chunk_full"  # stager: the journal says FULL, the flusher was not told
    SEALED = "sealed"  # stager: every slice is in the ring, nothing says so
    STAGED = "staged"  # stager: written down as staged, neither flusher nor ranks were told
    DOUBT_HEARD = "doubt_heard"  # stager: a rank doubts steps, nothing says so
    DOUBT_WRITTEN = "doubt_written"  # stager: that is beside the ring, neither flusher nor ranks were told
    # stager: the step after a checkpoint is beside the ring, the flusher was not told
    PROOF_WRITTEN = "proof_written"
    STAGED_HEARD = "staged_heard"  # flusher: was told that it is staged
    # flusher: an older whole checkpoint is to make room, nothing names it any more, its slots are FULL
    SUPERSEDED = "superseded"
    PART_BEGUN = "part_begun"  # flusher: a part is about to go to the store
    PART_WRITTEN = "part_written"  # flusher: the store has it, the ring's own record does not say so
    PART_RECORDED = "part_recorded"  # flusher: that is recorded, its slots are not free yet
    SHARES_BEGUN = "shares_begun"  # flusher that leads: the others may join its upload
    CRCS_PUT = "crcs_put"  # flusher of several: the others know its entries' CRCs
    SHARE_SEALED = "share_sealed"  # flusher of several: its share is written and sealed, and nobody was told
    ALL_SEALED = "all_sealed"  # flusher that leads: has seen all seals, and published nothing
    PARTS_DONE = "parts_done"  # flusher: all parts written, nothing published
    # flusher: the run is its own; now it names, lists, marks or removes something in it
    CLAIM_SEEN = "claim_seen"
    FILE_NAMED = "file_named"  # flusher: the file has its name, which is not yet known to be durable
    FILE_PUBLISHED = "file_published"  # flusher: the file is in place, its manifest is not
    MANIFEST_WRITTEN = "manifest_written"  # flusher: durable, and nobody was told
    PROOF_HEARD = "proof_heard"  # flusher: the checkpoint is published, its proof is not
    # flusher: one manifest says that its checkpoint is doubtful, others may not
    DOUBT_MARKED = "doubt_marked"
    VERIFYING = "verifying"  # flusher: in the middle of a read-back
    MANIFEST_DELETED = "manifest_deleted"  # flusher: retention has removed a manifest, not yet its file
    # flusher: a file that is no longer kept has lost its name; its room is kept
    FILE_RETIRED = "file_retired"
    ROOM_TAKEN = "room_taken"  # flusher: the next upload has that room, nothing is written over it
    RECOVERING = "recovering"  # flusher: has found a dead one's ring, and done nothing yet
    RING_TAKEN = "ring_taken"  # flusher: the ring's file is longer, its journal does not say so
    RING_ADDED = "ring_added"  # flusher: the journal has the new slots, the stager was not told
    GROWTH_HEARD = "growth_heard"  # stager: was told so, and has mapped none of them
    IMAGE_NAMED = "image_named"  # tool: the file of an image is in place, its manifest is not
    REJOINED = "rejoined"  # rank: a stager has welcomed it again, and was told nothing yet
    RESTORE_READ = "restore_read"  # rank: has read a part of the checkpoint to restore
    RING_SEEN = "ring_seen"  # rank: has seen what a slot of the stager's ring holds, and copied nothing of it
    # rank: a slot with an older slice is to be used again, the record names it still
    SLOT_RECYCLED = "slot_recycled"
    SLOT_UNSEALED = "slot_unsealed"  # rank: the record names it no more, nothing of it is overwritten
    SLOT_WRITTEN = "slot_written"  # rank: one frame is in its slot, others are not
    SLOT_SEALED = "slot_sealed"  # rank: the seal is behind its slice, neither is durable
    SLOT_FLUSHED = "slot_flushed"  # rank: both are durable, no record names them
    SLOT_RECORDED = "slot_recorded"  # rank: a commit sector is written, and not durable
    SLOT_COMMITTED = "slot_committed"  # rank: it is durable, and nobody was told
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
    """Read `VICTIM@POINT[#N]=kill|stop`, by commas. Raises `ConfigError`: names the wrong part, and what is allowed."""
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
# Counts are atomic under the GIL: points lie in several threads.
_reached: dict[Point, itertools.count[int]] = {}


def identify(victim: str) -> None:
    """Say who this process is (`rank:1`, `stager`, `flusher`), and read `HOLDFAST_FAULT` for it. Once, at its start."""
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
                # To this thread: sent to the process, another thread may take it, and this one runs on for a while.
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
