"""How many stagers a job needs by the time between two checkpoints: from what limits one stager, by arithmetic alone.

card ──────────────────────────────┐
receiving, and Python per frame ───┼─► the slowest: bytes a second of one stager ─► image / S / rate + the commit
connections to the store ──────────┘
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.image.shares import WRITERS_MAX

__all__ = ["StagerLimits", "checkpoint_seconds", "stagers_by_interval"]


@dataclass(frozen=True)
class StagerLimits:
    """Throughput of one stager and its flusher.

    Attributes:
        card_rate: Bytes a second of the network card, each way.
        receiving_seconds: The stager's one thread, for each byte that it receives.
        frame_seconds: The same thread, for each frame.
        frame_bytes: A frame's, on average.
        connections: Most requests to the store at once.
        connection_rate: Bytes a second of one of them.
    """

    card_rate: float
    receiving_seconds: float
    frame_seconds: float
    frame_bytes: float
    connections: int
    connection_rate: float

    @property
    def rates(self) -> dict[str, float]:
        """Bytes a second by each limit alone."""
        return {
            "card": self.card_rate,
            "stager's thread": 1 / (self.receiving_seconds + self.frame_seconds / self.frame_bytes),
            "connections to the store": self.connections * self.connection_rate,
        }

    @property
    def slowest(self) -> str:
        """The limit that is met first."""
        return min(self.rates, key=lambda name: self.rates[name])

    @property
    def rate(self) -> float:
        """Bytes a second that pass."""
        return self.rates[self.slowest]


def checkpoint_seconds(image_bytes: float, stagers: int, one: StagerLimits, commit_seconds: float) -> float:
    """From the first byte until durable: each stager has its share, and the commit comes on top."""
    return image_bytes / stagers / one.rate + commit_seconds


def stagers_by_interval(
    image_bytes: float, interval_seconds: float, one: StagerLimits, commit_seconds: float
) -> int | None:
    """The fewest stagers by which a checkpoint is durable before the next one begins; None: not even the most that a
    run may have are enough.
    """
    for stagers in range(1, WRITERS_MAX + 1):
        if checkpoint_seconds(image_bytes, stagers, one, commit_seconds) <= interval_seconds:
            return stagers
    return None
