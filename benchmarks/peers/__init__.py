"""The checkpointers that are compared, behind one small interface, and the training loop around each of them.

    start ── save() ──┬── compute (timed wait) ── before_update() ── optimizer step ──┬── … until done ── end
              stall                                    stall                              done

The computation is a timed wait: on a GPU machine the host's cores are free while the device computes, and
that is the machine holdfast is made for. The optimizer step runs its hooks (the gate waits there) and updates
nothing, as the device would do the update. A stall is whatever keeps the training thread longer than that.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.workload import Workload

__all__ = ["PEERS", "Peer", "Sample", "measure"]

# Order of the tables. The raw peers are no checkpointers, and run elsewhere.
PEERS = ("holdfast", "torch.save+fsync", "dcp-thread", "dcp-process")
_POLL_SECONDS = 0.001
_DONE_SECONDS_MAX = 300.0


class Peer(Protocol):
    """One way to save a state. All methods are called from the training thread."""

    def save(self, step: int) -> None:
        """Begin (or do) the checkpoint of `step`."""
        ...

    def before_update(self) -> None:
        """Wait for whatever must be over before the state may change."""
        ...

    def done(self) -> bool:
        """Whether the checkpoint is in persistent storage, synced. Cheap: it is asked every millisecond."""
        ...

    def marks(self) -> dict[str, float]:
        """Moments on the way (monotonic seconds, same clock in all processes), such as `staged`."""
        ...

    def clean(self, step: int) -> None:
        """Remove what the checkpoint left in storage. Not timed."""
        ...

    def close(self) -> None:
        """End; threads and helper processes are gone afterwards."""
        ...


@dataclass(frozen=True)
class Sample:
    """One checkpoint as one rank saw it; moments are `time.monotonic()`, one clock for the whole machine."""

    start: float
    end: float
    stall_seconds: float
    marks: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(peer: Peer, workload: Workload, step: int, compute_seconds: float) -> Sample:
    """Save `step` and train on until it is done.

    Raises:
        TimeoutError: It was not done within five minutes.
    """
    start = time.monotonic()
    peer.save(step)
    stall = time.monotonic() - start
    end = 0.0
    while not end:
        computed = time.monotonic() + compute_seconds
        while (now := time.monotonic()) < computed:
            if not end and peer.done():
                end = now
            time.sleep(_POLL_SECONDS)
        waiting = time.monotonic()
        peer.before_update()
        workload.update()
        stall += time.monotonic() - waiting
        if not end and peer.done():
            end = time.monotonic()
        if now - start > _DONE_SECONDS_MAX:
            raise TimeoutError(f"step {step} was not durable after {_DONE_SECONDS_MAX:.0f} s")
    return Sample(start, end, stall, peer.marks())


def fresh(path: Path) -> Path:
    """`path`, with its folder made and nothing in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    return path
