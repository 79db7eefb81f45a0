"""The rings of several stagers as one: each has the chunks of its share.

HELD      every ring ─► one list with the chunks of all; staged only if every ring with a part of it says so
bytes     the ring that had the neighbouring chunk, then the others in turn
layout    the first ring that has it        PROOF   the lead's ring, which has the proofs
PLACE     none: each rank reads through the stagers, although one may be on its machine
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from holdfast.ring.remains import FetchKind, HeldCheckpoint, decode_held, encode_held


class _Fetch(Protocol):
    def __call__(
        self, fetch_kind: FetchKind, *, attempt: int = 0, step: int = 0, chunk: int = 0, body: bytes = b""
    ) -> bytes | None: ...


class RingGroup:
    """Fetches from all rings. Any thread. `fetches`: Each asks one stager; the lead's comes first."""

    def __init__(self, fetches: Sequence[_Fetch]) -> None:
        self._fetches = list(fetches)
        self._last_ring: dict[
            tuple[int, int], int
        ] = {}  # attempt, step → the ring that had its last fetched chunk

    def fetch(
        self, fetch_kind: FetchKind, *, attempt: int = 0, step: int = 0, chunk: int = 0, body: bytes = b""
    ) -> bytes | None:
        """As `ToStager.fetch`. A lost stager raises, unless a ring asked before it has the bytes."""
        match fetch_kind:
            case FetchKind.HELD:
                return self._fetch_held()
            case FetchKind.PLACE:
                return None
            case FetchKind.PROOF:
                return self._fetches[0](fetch_kind, attempt=attempt, step=step)
            case _:
                return self._fetch_in_turn(fetch_kind, attempt, step, chunk, body)

    def _fetch_held(self) -> bytes:
        found: dict[tuple[int, int], list[HeldCheckpoint]] = {}
        for fetch in self._fetches:
            for held in decode_held(fetch(FetchKind.HELD) or encode_held([])):
                found.setdefault((held.attempt, held.step), []).append(held)
        return encode_held(_merge_parts(parts) for _, parts in sorted(found.items(), reverse=True))

    def _fetch_in_turn(
        self, fetch_kind: FetchKind, attempt: int, step: int, chunk: int, body: bytes
    ) -> bytes | None:
        first = self._last_ring.get((attempt, step), 0)
        for index in (first, *(other for other in range(len(self._fetches)) if other != first)):
            data = self._fetches[index](fetch_kind, attempt=attempt, step=step, chunk=chunk, body=body)
            if data is not None:
                self._last_ring[attempt, step] = index
                return data
        return None


def _merge_parts(parts: Sequence[HeldCheckpoint]) -> HeldCheckpoint:
    """Combine the parts of one checkpoint that the rings have."""
    digests = {part.staged_digest for part in parts}
    return HeldCheckpoint(
        parts[0].attempt,
        parts[0].step,
        # One part may have been given up although the others were staged.
        digests.pop() if len(digests) == 1 else "",
        {chunk: record for part in parts for chunk, record in part.chunks.items()},
        next((part.drift for part in parts if part.drift), ""),
        next((part.trackers for part in parts if part.trackers), {}),
    )
