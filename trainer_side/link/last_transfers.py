"""The checkpoints still in flight when a rank leaves its job, and the wait for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from trainer_side.link.job_state import JobState
from trainer_side.transfer import Transfer, TransferState

_log = logging.getLogger("holdfast.trainer.link")

_QUIET_SECONDS = 10.0  # until a log line says what the rank waits for


class LastTransfers:
    """The transfers still in flight. Training thread."""

    def __init__(self, job: JobState, transfers: Sequence[Transfer], clock: Callable[[], float]) -> None:
        self._job, self._transfers, self._clock = job, transfers, clock

    def wait(self, wait_for: TransferState, seconds_max: float) -> None:
        """Wait until each is durable (or staged), or has failed, at most `seconds_max` in all. Log late ones."""
        deadline = self._clock() + seconds_max
        is_logged = self._job.rank != 0  # all ranks wait, and rank 0 says so
        for transfer in self._transfers:
            event = transfer.ended if wait_for is TransferState.DURABLE else transfer.settled
            quiet_seconds = min(_QUIET_SECONDS, max(0.0, deadline - self._clock()))
            if not is_logged and not event.wait(quiet_seconds) and self._job.problem is None:
                is_logged = True
                _log.warning(
                    "waiting until %s for step %d, which is %s, to be %s; if it is the store, the stager says why",
                    time.strftime("%H:%M:%S", time.localtime(time.time() + deadline - self._clock())),
                    transfer.step,
                    transfer.state.value,
                    wait_for.value,
                )
            if not event.wait(max(0.0, deadline - self._clock())) and self._job.problem is None:
                _log.error(
                    "rank %d: close() waited %g s for step %d, which is %s and not yet %s; look at the log of the "
                    "flusher",
                    self._job.rank,
                    seconds_max,
                    transfer.step,
                    transfer.state.value,
                    wait_for.value,
                )
