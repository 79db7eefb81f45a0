"""Runs the pipeline's jobs in threads, and retries those that must wait.

    submit ─► checkers │ writers │ lookers │ publishers ─► inbox: the answer, `JobFailed`, or
                                                           `Retry`      the store fails         ─► retry_queue
                                                           `PollAgain`  another flusher is late ─► share_polls

All methods are for the loop's thread, unless a docstring says otherwise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from flusher.flusher_context import FlusherContext
from flusher.jobs import Jobs
from flusher.retry_queue import RetryCounts, RetryQueue
from flusher.share_jobs import PeerNotReady
from flusher.share_polls import PollAgain, SharePolls
from flusher.steps import Job, JobFailed, ReadCrcs, ReadSeal, WritePart
from flusher.workers import Workers
from holdfast.errors import FencedError, HoldfastError, PeerLost, StoreError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.shares import WRITERS_MAX
from holdfast.store.concurrency import ConcurrencyLimit

_log = logging.getLogger("holdfast.flusher")
_CHECKERS = 2  # one computes CRCs faster than most networks bring chunks
_LOST_ROUNDS = 3  # for an error that allows both: retry this often, then start over


class Retry(NamedTuple):
    """The store failed a job."""

    job: Job
    round_number: int
    error: StoreError


class JobRunner:
    """Queues jobs for four kinds of threads.

    Args:
        is_dropping: Tells whether a checkpoint is being given up, so that its jobs need not succeed.

    Attributes:
        running: Jobs that have not answered yet.
        publishers: One thread for requests that must not occupy a writer.
    """

    def __init__(
        self,
        jobs: Jobs,
        context: FlusherContext,
        writers: ConcurrencyLimit,
        is_dropping: Callable[[CheckpointId], bool],
    ) -> None:
        self._jobs, self._inbox, self._is_dropping = jobs, context.inbox, is_dropping
        # Separate from the writers: a chunk queued for its check behind parts being uploaded leaves the store idle.
        self._checkers = Workers("checker", _CHECKERS)
        self._writers = Workers("writer", writers.maximum, writers)
        # One for each other share: all their records are read in the time of one request.
        self._pollers = Workers("looker", WRITERS_MAX - 1)
        self.publishers = Workers("publisher", 1)
        self._retries = RetryQueue()
        self._retry_counts = RetryCounts(context.events)
        self.polls = SharePolls(context.share)
        self.running = 0

    def stop(self) -> None:
        """Stop the threads: drop queued jobs, and wait for running ones."""
        for workers in (self._checkers, self._writers, self._pollers, self.publishers):
            workers.stop()

    def submit(self, job: Job, round_number: int = 0, since: float | None = None) -> None:
        """Run a job. `round_number`: how often the store has failed it; `since`: when it first polled others."""
        self.running += 1
        workers = self._writers if isinstance(job, WritePart) else self._checkers
        if isinstance(job, ReadCrcs | ReadSeal):
            workers = self._pollers
        elif not job.slots:  # opening and publishing wait for the store, and must not occupy a writer
            workers = self.publishers
        workers.submit((0, *job.key), lambda: self._run(job, round_number, since))  # older checkpoints first

    def _run(self, job: Job, round_number: int, since: float | None) -> int:
        """Run a job in a worker thread; return how many bytes the store accepted."""
        try:
            self._inbox.put(self._jobs.run(job))
            return sum(nbytes for _, nbytes in job.pieces) if isinstance(job, WritePart) else 0
        except PeerNotReady as missing:
            self._inbox.put(PollAgain(job, str(missing), time.monotonic() if since is None else since))
        except StoreError as error:
            must_restart = error.begin_anew and (not error.retriable or round_number >= _LOST_ROUNDS)
            self._inbox.put(
                JobFailed(job.key, job.slots, error) if must_restart else Retry(job, round_number, error)
            )
        except FencedError as error:
            self._inbox.put(error)
        except HoldfastError as error:
            self._inbox.put(JobFailed(job.key, job.slots, error))
        except OSError as error:  # of this machine, such as no descriptors: retry
            store_error = StoreError(f"{job.key}: {type(job).__name__}: {error}", retriable=True)
            self._inbox.put(Retry(job, round_number, store_error))
        except Exception as error:  # noqa: BLE001 - a bug costs this checkpoint, never the ring with all the others
            _log.exception("%s: %s failed with an unexpected error", job.key, type(job).__name__)
            self._inbox.put(
                JobFailed(job.key, job.slots, StoreError(f"{job.key}: {type(error).__name__}: {error}"))
            )
        return 0

    # -- retries -------------------------------------------------------------------------------------------------

    def retry(self, item: Retry, on_failed: Callable[[JobFailed], None]) -> None:
        """Retry a job after a pause. `on_failed` is called instead if its checkpoint is being given up."""
        job, round_number, error = item
        given_up = JobFailed(job.key, job.slots, error)
        if self._is_dropping(job.key):
            on_failed(given_up)
            return

        def resubmit() -> None:
            if self._is_dropping(job.key):
                on_failed(given_up)
            else:
                self.submit(job, round_number + 1)

        self._retries.put(job.key, self._retry_counts.count_failure(job.key, error), resubmit)

    def poll_again(self, item: PollAgain, attempt: int, on_failed: Callable[[JobFailed], None]) -> None:
        """Have a job poll another flusher again later, up to a timeout. `attempt`: the ring's."""
        job = item.job

        def resubmit() -> None:
            if self._is_dropping(job.key):
                on_failed(JobFailed(job.key, job.slots, PeerLost(f"{job.key}: given up")))
            else:
                self.submit(job, since=item.since)

        error = self.polls.timeout_error(item, attempt)
        if error is not None:
            on_failed(JobFailed(job.key, job.slots, error))
        elif self._is_dropping(job.key):
            resubmit()
        else:
            self.polls.put(item, resubmit)

    def call_later(self, key: CheckpointId, error: StoreError, callback: Callable[[], None]) -> None:
        """Call `callback` after the retry pause of this checkpoint."""
        self._retries.put(key, self._retry_counts.count_failure(key, error), callback)

    def make_due(self, key: CheckpointId) -> None:
        """Make the pending retries and polls of a checkpoint due now."""
        self._retries.make_due(key)
        self.polls.make_due(key)

    def on_progress(self, key: CheckpointId) -> None:
        """Note a success. If the store had been failing this checkpoint, make all pending retries due now."""
        if self._retry_counts.on_progress(key):
            self._retries.make_due()

    def forget(self, key: CheckpointId) -> None:
        self._retry_counts.forget(key)
        self.polls.forget(key)

    def run_due(self) -> None:
        self._retries.run_due()
        self.polls.run_due()

    # -- waiting for the store -----------------------------------------------------------------------------------

    @property
    def waits_for_store(self) -> bool:
        return bool(self._retries)

    @property
    def wait_seconds(self) -> list[float]:
        """Seconds until the next retry and the next poll are due, if any."""
        waits = (self._retries.wait_seconds, self.polls.wait_seconds)
        return [wait for wait in waits if wait is not None]

    @property
    def held_seconds(self) -> float:
        """How long all work has been waiting for the store; 0 while anything else is in progress."""
        return self._retry_counts.seconds

    @property
    def held_error(self) -> StoreError | None:
        """The last error of the store; None if it has never failed."""
        return self._retry_counts.error
