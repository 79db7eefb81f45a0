"""The interface of the stager's loop to the training ranks: messages, payloads into the ring, lost ranks.

`stager.mpi` implements it for processes of the same MPI job, `stager.tcp` for TCP connections. One thread only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from holdfast.image.entries import Extent


@dataclass
class PollResult:
    """Result of one poll: `(trainer, message)` in order of arrival, and `(trainer, reason)` of newly lost trainers."""

    messages: list[tuple[int, bytes]] = field(default_factory=list)
    lost: list[tuple[int, str]] = field(default_factory=list)


class TrainersPort(Protocol):
    """Transport between the stager and its training ranks, which are numbered 0 to `ranks` - 1."""

    ranks: int

    @property
    def unsent(self) -> bool:
        """Whether control messages to living ranks are in flight."""
        ...

    def unsent_to(self, rank: int) -> int:
        """How many control messages to this rank are in flight."""
        ...

    def fileno(self) -> int | None:
        """A descriptor that can be read when `poll` has work; None if the loop must poll."""
        ...

    def send(self, rank: int, message: bytes) -> None:
        """Send a control message; ignored for a lost rank."""
        ...

    def poll(self) -> PollResult:
        """Return the control messages that have arrived, and the ranks newly found dead. Never waits."""
        ...

    def mark_left(self, rank: int) -> None:
        """The rank has left, or its messages are ignored: its end is no loss."""
        ...

    def post(self, rank: int, slot: int, memory: memoryview, pieces: tuple[Extent, ...]) -> None:
        """Post the receive of `pieces` (offsets within `memory`, the slot) from `rank`; the credit is sent after it."""
        ...

    def pop_received(self, rank: int, slot: int) -> int | None:
        """Return the payload's size in bytes once it is complete, and forget it; None before."""
        ...

    def cancel(self, rank: int, slot: int) -> None:
        """Withdraw the receive of a payload that will not be sent."""
        ...
