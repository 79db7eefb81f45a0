"""How a rank leaves its job: with its last checkpoint durable, or quickly if the script has failed.

    the block ends, close() ─► waits until all is durable, at most close_seconds_max ─► NotDurable if the newest is not
    an exception ends it ────► logs it ─► waits until all is staged, at most EXIT_SECONDS_MAX ─► logs what is safe
    after a preemption notice ► saves the last finished step first, or logs why it cannot
    Ctrl-C meanwhile ────────► waits for nothing more; the flusher makes durable what is staged
    a thread of this rank has died ─► as with an exception; then ThreadDied ends the block

In every case the stager gets this rank's good-bye, and the threads end before the interpreter does.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import Literal

from holdfast.errors import HoldfastError, NotDurable
from holdfast.lost_peer import is_lost_peer
from holdfast.notices.notice import Notice
from holdfast.telemetry.causes import DeclineCause
from trainer_side.background_thread import ThreadDied
from trainer_side.ledger import Ledger
from trainer_side.link.to_stager import ToStager
from trainer_side.save.copier import Copier
from trainer_side.save.finished_step import FinishedStep
from trainer_side.tiers.tier_set import TierSet
from trainer_side.transfer import TransferState

_log = logging.getLogger("holdfast.trainer")

# after an exception, for the steps in flight to be staged; the good-byes take some more
EXIT_SECONDS_MAX = 10.0
_NO_DEADLINE_SECONDS = 30.0  # for the last step, after a notice without a deadline
_SAFETY_SECONDS = 1.0
_POLL_SECONDS = 5e-3


class Leaving:
    """The end of a rank's job. Training thread. The last steps may take `seconds_max` to become durable."""

    def __init__(
        self,
        copier: Copier,
        tiers: TierSet,
        link: ToStager,
        ledger: Ledger,
        *,
        seconds_max: float,
        on_not_durable: Literal["fail", "warn"],
    ) -> None:
        self._copier, self._tiers, self._link, self._ledger = copier, tiers, link, ledger
        self._seconds_max, self._on_not_durable = seconds_max, on_not_durable
        self.newest_step = -1  # newest step whose save was begun; -1: none
        self.wanted_step = -1  # newest step that was to be saved, whether it was or not; -1: none

    @property
    def thread_error(self) -> ThreadDied | None:
        """The error that ended a thread which checkpoints need; None while all live."""
        problem = self._link.job.problem
        return (
            self._copier.problem or (problem if isinstance(problem, ThreadDied) else None) or self._tiers.died
        )

    def leave_after_training(self) -> None:
        """Wait until all steps are durable, and leave.

        ThreadDied: a thread of this rank has died. NotDurable: the newest step that was to be saved is not durable.
        """
        try:
            if self.thread_error is None:
                self._close_parts(TransferState.DURABLE, self._seconds_max)
            else:
                self._close_parts(TransferState.STAGED, EXIT_SECONDS_MAX, shared_deadline=True)
        except KeyboardInterrupt:
            self.log_safe_step()
            raise
        if self.thread_error is not None:
            raise self.thread_error
        if why := self._not_durable_reason():
            if self._on_not_durable == "fail":
                raise NotDurable(why)
            _log.error("rank %d: %s", self._link.job.rank, why)

    def _not_durable_reason(self) -> str:
        """Why the newest step that was to be saved is not durable; empty if it is, or no step was."""
        step, durable, problem = self.wanted_step, self._link.job.durable_step, self._link.job.problem
        # Without a stager there is nothing safer than the tiers.
        kept = -1 if self._link.job.is_alive else self._tiers.complete_step
        if max(durable, kept) >= step:
            return ""
        parts = [f"step {step}, the newest that was to be saved, is not durable"]
        parts.append(f"step {durable} is" if durable >= 0 else "nor is any other of this job")
        if problem is not None:
            parts.append(f"the stager is lost ({problem})")
        elif self._link.job.staged_step >= step:
            parts.append("it is staged, and the flusher finishes it alone")
        else:
            parts.append(f"{self._ledger.summary() or 'it was given up'}")
        return "; ".join(parts)

    def has_lost_peer(self, error: BaseException) -> bool:
        """Whether a collective has failed because a rank is lost: no step of all ranks can be saved then."""
        if isinstance(error, HoldfastError) or not is_lost_peer(type(error).__name__, str(error)):
            return False
        _log.warning(
            "rank %d: nothing is saved after the notice: another rank of the job is lost", self._link.job.rank
        )
        return True

    def save_last(self, finished: FinishedStep, save: Callable[[int], bool], notice: Notice) -> None:
        """Save the last finished step because of `notice`, before the block ends by an exception; or log why not.

        Every rank that leaves this way does the same. The step is whole only if all of them do, before the deadline.
        """
        rank, step = self._link.job.rank, finished.step
        if step < 0:
            _log.error("rank %d: nothing is saved after the notice: no step was finished", rank)
            return
        if threading.current_thread() is threading.main_thread():
            # Otherwise loaders raise in this thread for each worker that dies.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        left = notice.seconds_left()
        deadline = time.monotonic() + (_NO_DEADLINE_SECONDS if left is None else left - _SAFETY_SECONDS)
        try:
            why = self._try_save_last(finished, save, deadline)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the script's own exception is raised
            why = f"{type(error).__name__}: {error}"
        if why:
            reason = DeclineCause.LATE.because(f"it was to be saved after the notice, but {why}")
            self._link.decline(step, reason)
            self._tiers.skip(step, reason)
            _log.error(
                "rank %d: step %d, the last finished one, is not saved after the notice: %s", rank, step, why
            )
        else:
            _log.warning(
                "rank %d: step %d, the last finished one, is %s: it was saved because of the notice",
                rank,
                step,
                "staged" if self._link.job.staged_step >= step else "kept in local tiers",
            )

    def _try_save_last(self, finished: FinishedStep, save: Callable[[int], bool], deadline: float) -> str:
        step, seconds, before = finished.step, deadline - time.monotonic(), self._causes()
        if self._is_safe(step):
            return ""
        if seconds <= 0:
            return "its deadline has passed"
        if step != self.newest_step:  # otherwise its save has begun already
            if why := finished.stale_reason():
                return f"the exception came in the middle of the next one, and {why}"
            finished.restore_values()
            self._tiers.council.limit_wait(seconds)
            if not save(step):
                return "save() declined it, see above"
        _log.warning(
            "rank %d: step %d, the last finished one, is in flight because of the notice; waiting at most %.1f s",
            self._link.job.rank,
            step,
            seconds,
        )
        while not self._is_safe(step):
            if self.thread_error is not None or (causes := self._causes()) != before:
                return f"it was given up ({', '.join(causes) if self.thread_error is None else self.thread_error})"
            if time.monotonic() > deadline:
                return f"the other ranks did not save the same step within {seconds:.1f} s"
            time.sleep(_POLL_SECONDS)
        return ""

    def _causes(self) -> dict[str, int]:
        """Return the causes of steps that were not saved so far."""
        return dict(self._ledger.stats.causes)

    def _is_safe(self, step: int) -> bool:
        return max(self._link.job.staged_step, self._tiers.complete_step) >= step

    def leave_after_error(self, error: BaseException) -> None:
        """Leave quickly after an exception of the script, and log how to continue."""
        try:
            self._close_parts(TransferState.STAGED, EXIT_SECONDS_MAX, shared_deadline=True)
        except KeyboardInterrupt:
            if not isinstance(error, KeyboardInterrupt):
                raise  # otherwise the first one is raised
        finally:
            self.log_safe_step()

    def log_exception(self, error: BaseException) -> None:
        """Log the exception that ends the block, before any wait."""
        if isinstance(error, HoldfastError):
            return  # logged once for all ranks, by the lowest that has it (ranks/uncaught.py)
        exception_text = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
        last_frame = traceback.extract_tb(error.__traceback__)[-1:]
        place = f" (at {last_frame[0].filename}:{last_frame[0].lineno})" if last_frame else ""
        _log.error(
            "rank %d: %s%s ends the training; waiting until checkpoints in flight are staged, at most %g s",
            self._link.job.rank,
            exception_text,
            place,
            EXIT_SECONDS_MAX,
        )

    def log_safe_step(self) -> None:
        """Log the step that a restart resumes from. On rank 0."""
        if self._link.job.rank != 0:
            return
        job, kept = self._link.job, self._tiers.complete_step
        durable, staged = job.durable_step, job.staged_step
        safe = [f"step {durable} is durable"] if durable >= 0 else []
        if staged > durable:
            safe.append(f"step {staged} is staged, and the flusher makes it durable")
        if kept > max(durable, staged):
            safe.append(f"step {kept} is kept in {self._tiers.names}")
        _log.warning(
            "%s; to continue from there, start the same command again"
            if safe
            else "%s; a restart resumes from where this job began",
            ", ".join(safe) or "no checkpoint of this job is staged",
        )

    def _close_parts(
        self, wait_for: TransferState, seconds_max: float, *, shared_deadline: bool = False
    ) -> None:
        """Close all parts. `shared_deadline`: `seconds_max` limits their sum, not each wait."""
        deadline = time.monotonic() + seconds_max

        def left() -> float:
            return max(0.0, deadline - time.monotonic()) if shared_deadline else seconds_max

        try:
            self._copier.close(left() if shared_deadline else None)
            self._tiers.close(left())
            self._link.close(wait_for=wait_for, seconds_max=left())
        except BaseException as error:
            if not isinstance(error, HoldfastError):
                _log.warning(
                    "rank %d: %s ends the wait for checkpoints in flight; staged ones are safe, the rest is given up",
                    self._link.job.rank,
                    type(error).__name__,
                )
            self._link.close(wait_for=TransferState.STAGED, seconds_max=0.0)
            raise
