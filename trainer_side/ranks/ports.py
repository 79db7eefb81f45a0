"""The interfaces of a training rank to its stager, and for messages among the ranks (world.py has the job)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from holdfast.errors import PeerLost


class GenerationOver(PeerLost):
    """The stager refuses this generation of the job's start; the ranks may return as the next one."""


class StartReplaced(PeerLost):
    """The launcher has restarted the job, so no stager serves this older start any more."""


class StagerPort(Protocol):
    """Messages and payloads to and from the stager. One thread at a time.

    Every method raises `PeerLost` when the stager is known to be lost.
    """

    has_threads: bool  # payloads move in threads of their own; otherwise only while this port is polled

    @property
    def one_machine(self) -> bool:
        """Whether the stager is known to be on this machine; it then mostly reads payloads by itself."""
        ...

    @property
    def processes_per_core(self) -> float:
        """Processes of the job per core of this machine; 0 if unknown."""
        ...

    def send(self, message: bytes) -> None:
        """Send a control message. Messages arrive in the order of sending."""
        ...

    def send_payload(self, payload: memoryview, slot: int, pieces: Sequence[int]) -> int:
        """Begin to send the payload of the credit for `slot`; return a handle.

        `pieces` are the sizes of its parts. The bytes must not change until `is_sent(handle)`.
        """
        ...

    def is_sent(self, handle: int) -> bool:
        """Whether the payload was read to its end, so that its memory may change."""
        ...

    def poll(self) -> list[bytes]:
        """Return the control messages that have arrived. Never waits."""
        ...

    def disconnect(self, seconds_max: float, *, lost: bool = False) -> None:
        """Send BYE, once, and wait until all queued messages and payloads were sent, at most `seconds_max`.

        With `lost` the stager has timed out, and the call does not wait for it.
        """
        ...


class RanksPort(Protocol):
    """Messages among the training ranks."""

    rank: int
    ranks: int

    def send(self, rank: int, message: bytes) -> None:
        """Send to another rank; ignored for a dead one."""
        ...

    def poll(self) -> list[tuple[int, bytes]]:
        """Return the messages that have arrived, each with its sender. Never waits."""
        ...


class CouncilPort(RanksPort, Protocol):
    """Messages among the ranks for the local tiers, in the order of sending. Only for the council's thread."""

    def lost_ranks(self) -> frozenset[int]:
        """Ranks that are known to be dead."""
        ...

    def flush(self, seconds_max: float) -> None:
        """Wait until every message was sent, at most `seconds_max`."""
        ...
