"""Computes how many stagers a job needs, from the time between two checkpoints and the limits of one stager.

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
        receiving_seconds: Time of the stager's thread for each byte received.
        frame_seconds: Time of the same thread for each frame.
        frame_bytes: Average size of a frame.
        connections: Most concurrent requests to the store.
        connection_rate: Bytes a second of one such request.
    """

    card_rate: float
    receiving_seconds: float
    frame_seconds: float
    frame_bytes: float
    connections: int
    connection_rate: float

    @property
    def rates(self) -> dict[str, float]:
        """Bytes a second that each limit allows."""
        return {
            "card": self.card_rate,
            "stager's thread": 1 / (self.receiving_seconds + self.frame_seconds / self.frame_bytes),
            "connections to the store": self.connections * self.connection_rate,
        }

    @property
    def slowest(self) -> str:
        """Name of the tightest limit."""
        return min(self.rates, key=lambda name: self.rates[name])

    @property
    def rate(self) -> float:
        """Bytes a second that all limits allow."""
        return self.rates[self.slowest]


def checkpoint_seconds(image_bytes: float, stagers: int, one: StagerLimits, commit_seconds: float) -> float:
    """Return seconds from the first byte until durable: one stager's share of the image, plus the commit."""
    return image_bytes / stagers / one.rate + commit_seconds


def stagers_by_interval(
    image_bytes: float, interval_seconds: float, one: StagerLimits, commit_seconds: float
) -> int | None:
    """Return the fewest stagers that make a checkpoint durable before the next one begins; None if even the largest
    allowed number is too small.
    """
    for stagers in range(1, WRITERS_MAX + 1):
        if checkpoint_seconds(image_bytes, stagers, one, commit_seconds) <= interval_seconds:
            return stagers
    return None
