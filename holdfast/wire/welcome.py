"""WELCOME, the stager's first message to each rank: the run, the attempt, and the sizes of chunks and ring."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from holdfast.errors import HoldfastError, ProtocolError
from holdfast.wire.failure_count import NO_FAILURES, FailureCount
from holdfast.wire.frames import WHOLE_MAX, Frame, Kind, encode, error_fields, json_body, peer_error, to_json

_SECONDS_MAX = 1e9  # selectors and threads can wait this long; the check also refuses infinity and NaN


@dataclass(frozen=True, slots=True)
class Welcome:
    """The fields of WELCOME."""

    store_url: str
    attempt: int  # fencing epoch of this job; all later frames carry it
    chunk_bytes: int
    ring_chunks: int
    ranks: int
    offer_seconds_max: float  # how long the stager waits for the last rank's offer of a step
    beat_seconds: float
    share: int = 1  # the stager's number among several, from 1
    shares: int = 1  # number of stagers
    ring: str = ""  # identity of the stager's ring; empty: unknown
    seen: FailureCount = NO_FAILURES  # failures of the run before this job

    def to_frame(self) -> bytes:
        return encode(Kind.WELCOME, attempt=self.attempt, body=to_json(asdict(self)))

    @classmethod
    def from_frame(cls, frame: Frame) -> Welcome:
        """Read one. Raises `HoldfastError`: the stager's own error; `ProtocolError`: it is malformed."""
        document = json_body(frame)
        error = document.get("error")
        if isinstance(error, dict):
            raise peer_error(str(error.get("code")), str(error.get("message")))
        document = json_body(
            frame,
            store_url=str,
            attempt=int,
            chunk_bytes=int,
            ring_chunks=int,
            ranks=int,
            offer_seconds_max=float,
            beat_seconds=float,
            share=int,
            shares=int,
        )
        document.setdefault("ring", "")
        if not isinstance(document["ring"], str):
            raise ProtocolError(f"WELCOME: ring is {document['ring']!r:.80}, expected str")
        seen = FailureCount.from_json(document.get("seen"))
        welcome = cls(**{name: document[name] for name in cls.__slots__ if name != "seen"}, seen=seen)
        numbers = (
            *(welcome.attempt, welcome.chunk_bytes, welcome.ring_chunks, welcome.ranks),
            *(welcome.share, welcome.shares),
        )
        seconds = (welcome.beat_seconds, welcome.offer_seconds_max)
        if not all(0 < number < WHOLE_MAX for number in numbers) or not all(
            0 < s < _SECONDS_MAX for s in seconds
        ):
            raise ProtocolError(
                f"WELCOME: expected numbers above 0 that are no infinity, got {welcome!r:.500}"
            )
        if welcome.share > welcome.shares:
            raise ProtocolError(f"WELCOME: share {welcome.share} of {welcome.shares}, expected one of them")
        return welcome

    @staticmethod
    def refusal_frame(error: HoldfastError) -> bytes:
        """A WELCOME that says why the stager could not start."""
        return encode(Kind.WELCOME, body=to_json({"error": error_fields(error)}))
