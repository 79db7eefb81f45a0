"""The training ranks, as the stager's loop sees them: their messages, their payloads into the ring, who is lost.

`stager.mpi` has them as processes of the same MPI job, `stager.tcp` over connections. One thread only.
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
    """Everything between the stager and its training ranks, who are numbered 0 to `ranks` - 1."""

    ranks: int

    @property
    def unsent(self) -> bool:
        """Whether control messages are still on their way to living ranks."""
        ...

    def unsent_to(self, rank: int) -> int:
        """How many control messages are still on their way to this rank."""
        ...

    def fileno(self) -> int | None:
        """A descriptor that can be read when `poll` has something to do; None where only `poll` finds out."""
        ...

    def send(self, rank: int, message: bytes) -> None:
        """Send a control message; to a lost rank nothing happens."""
        ...

    def poll(self) -> PollResult:
        """All control messages that have come, then the ranks found dead. Never waits."""
        ...

    def left(self, rank: int) -> None:
        """This rank has left, or is heard no more: its end is no loss."""
        ...

    def post(self, rank: int, slot: int, memory: memoryview, pieces: tuple[Extent, ...]) -> None:
        """Be ready for `pieces` (offsets within `memory`, the slot) from `rank`; then send it the credit."""
        ...

    def received(self, rank: int, slot: int) -> int | None:
        """How many bytes have come, when the payload is complete; None before. Forgets it then."""
        ...

    def cancel(self, rank: int, slot: int) -> None:
        """Expect a payload no more that will not come."""
        ...
