"""Shares of checkpoints whose stager is lost. Each is offered again to the stager's next process.

    stager lost ─► hold ─┬─ reached again, same attempt and ring ─► offered again, from the staging area
                         ├─ reached again, another ring ──────────► failed
                         ├─ the step has ended meanwhile, or this
                         │  rank has declined it ─────────────────► declined there
                         └─ LOST_STAGER_SECONDS_MAX after the first loss ─► failed

A rank with local tiers holds no share: its memory is needed for the next steps, which go to the tiers. The ring's
flusher keeps the chunks that arrived before the loss, and gives them up by itself after the same time.
Another ring has another flusher, and one of the two could give up what the other has written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from holdfast.errors import HoldfastError, PeerLost
from holdfast.image.shares import LOST_STAGER_SECONDS_MAX
from holdfast.telemetry.causes import Reason
from trainer_side.link.outgoing import Outgoing
from trainer_side.transfer import TransferState


class HeldShares:
    """The shares that wait for the next process of one link's stager. Link's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: list[Outgoing] = []  # oldest first
        self._deadlines: dict[int, float] = {}  # step → deadline, from the first loss on
        self._error: HoldfastError | None = None

    def hold(self, shares: list[Outgoing], error: HoldfastError) -> None:
        shares = [*shares, *self._held]  # lost again before `drain` had reached the newer ones
        until = self._clock() + LOST_STAGER_SECONDS_MAX
        self._deadlines = {one.transfer.step: self._deadlines.get(one.transfer.step, until) for one in shares}
        self._held, self._error = shares, error

    def decline(self, step: int, reason: Reason) -> None:
        """Decline a step, for example because its copy is torn; `drain` yields it without a transfer."""
        for one in self._held:
            if one.transfer.step == step:
                one.transfer.set_state(TransferState.DECLINED, reason)

    def drain(self) -> Iterator[tuple[int, Outgoing | None]]:
        """Yield the held steps, oldest first, each with the transfer to offer again; None: the step has ended."""
        while self._held:
            one = self._held.pop(0)
            yield one.transfer.step, one.retry()

    def fail_expired(self) -> None:
        """Fail the shares whose deadline has passed; later steps keep waiting."""
        now = self._clock()
        expired = [one for one in self._held if now > self._deadlines[one.transfer.step]]
        self._fail(
            expired, PeerLost(f"{self._error}; not reached again within {LOST_STAGER_SECONDS_MAX:g} s")
        )

    def fail_all(self, error: HoldfastError) -> None:
        self._fail(self._held, error)

    def _fail(self, shares: list[Outgoing], error: HoldfastError) -> None:
        self._held = [one for one in self._held if one not in shares]
        for one in shares:
            one.transfer.set_state(TransferState.FAILED, Reason.from_error(error))
