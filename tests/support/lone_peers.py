"""The peers of a rank that is alone, for what restores without MPI."""

from __future__ import annotations

from collections.abc import Sequence


class LonePeers:
    """One rank by itself."""

    rank = 0
    ranks = 1

    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        assert data is not None, f"rank {root} gave nothing"
        return data

    def all_agree(self, ok: bool) -> bool:
        return ok

    def share(self, pieces: Sequence[tuple[int, int]], root: int) -> None:
        """There is nobody to share with."""

    def poll(self) -> None:
        """Nothing was queued."""

    def finish(self, deadline_seconds: float) -> None:
        """Nothing was queued."""
