"""The job as this rank knows it: the rank's number, and the state of its connection to the stager."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from holdfast.errors import HoldfastError
from holdfast.wire.failure_count import NO_FAILURES, FailureCount


class StagerLosses(NamedTuple):
    """How often the stager was lost, and for how many seconds in total, including a current loss."""

    losses: int = 0
    seconds: float = 0.0


class JobState:
    """State of the job. The link's thread writes it, any thread reads it.

    `attempt`: Assigned by the stager; None: the job has no stager. `prior_failures`: The failures of the run before
    this job.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        *,
        store_url: str,
        chunk_bytes: int,
        attempt: int | None,
        prior_failures: FailureCount = NO_FAILURES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank, self.ranks, self.store_url, self.chunk_bytes = rank, ranks, store_url, chunk_bytes
        # One for each attempt that a stager began, oldest first.
        self.attempts: tuple[int, ...] = () if attempt is None else (attempt,)
        self.attempt = attempt or 0  # the newest of them; 0 without a stager
        self.problem: HoldfastError | None = None  # why the stager is lost; None while it is not
        self.staged_step = self.durable_step = -1  # the newest ones; -1 before the first
        self.new_pickle_reserve_bytes = 0  # granted to rank 0's pickle after it has outgrown its reserve
        self.group: JobState | None = None  # of all stagers, if there are several
        self.prior_failures, self._clock = prior_failures, clock
        self._last_problem: HoldfastError | None = None
        self._past_losses, self._lost_at = StagerLosses(), 0.0

    @property
    def stagers(self) -> int:
        """How many stagers the job has, lost or not."""
        return int(self.has_stager)

    @property
    def has_stager(self) -> bool:
        """Whether the job has a stager, lost or not."""
        return bool(self.attempts)

    @property
    def is_alive(self) -> bool:
        """Whether a stager takes steps now."""
        return self.has_stager and self.problem is None

    @property
    def lead_problem(self) -> HoldfastError | None:
        """Why the stager that names a step after a notice is lost: the only one, or the lead of several."""
        return self.problem

    @property
    def stager_losses(self) -> StagerLosses:
        if self.problem is None:
            return self._past_losses
        losses, seconds = self._past_losses
        return StagerLosses(losses + 1, seconds + self._clock() - self._lost_at)

    def grow_pickle_reserve(self, new_reserve_bytes: int) -> None:
        self.new_pickle_reserve_bytes = max(self.new_pickle_reserve_bytes, new_reserve_bytes)
        if self.group is not None:
            self.group.grow_pickle_reserve(new_reserve_bytes)

    def is_last_loss(self, error: HoldfastError) -> bool:
        """Whether `error` is the last loss of the stager, even if the stager is back."""
        return error is self._last_problem

    def mark_lost(self, error: HoldfastError) -> None:
        self._lost_at = self._clock()
        self.problem = self._last_problem = error

    def replace_problem(self, error: HoldfastError) -> None:
        """Note that another stager is lost than the one that was lost first, which is back."""
        self.problem = self._last_problem = error

    def rejoin(self, attempt: int) -> None:
        """Note the WELCOME of a stager as `attempt`; `problem` stays until the link uses that stager."""
        if attempt != self.attempt:  # otherwise the lost stager's next process continues its attempt
            self.attempt, self.attempts = attempt, (*self.attempts, attempt)
        self.staged_step = self.durable_step  # newer staged steps may be gone with the lost stager's machine

    def mark_recovered(self) -> None:
        """Note that the link uses the stager again."""
        self._past_losses, self.problem = self.stager_losses, None
