"""The `Checkpointer`, the object that a training loop talks to. `builder.py` makes the parts that do its work.

    save(step) ─► Saver ──► Planner   chooses what is copied to which place of the image; agrees with the other ranks
                    ├─────► StagingPool   finds staging areas and slots of tiers; waits for them, or declines the step
                    ├─────► Copier    runs the copy thread, and the gate that holds optimizers back
                    ├─────► Link      sends the copy to the stager, on a thread of its own
                    └─────► TierSet   writes the copy into local tiers, if there are any
    restore() ─► restore/restore.py
    step(step) ─► the interval, and AgreedSteps after a preemption notice: whether a checkpoint is due
    track(…) ─► MarkSender   tells experiment trackers about the checkpoints, on a thread of its own

After start-up, restore and the first step after it, the training thread runs no collective operation. Every wait has a
deadline.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self

from holdfast import supervised as diary
from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError, StateError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.save_record import is_trackers
from holdfast.notices.notice import Notice, NoticeKind
from holdfast.store import open_store
from holdfast.supervised import emit_progress, register_end_report, report
from trainer_side.builder import build
from trainer_side.ledger import Stats
from trainer_side.opaque import OpaqueContext, opaque_methods
from trainer_side.pace.schedule import chosen_interval
from trainer_side.proof.digest_taker import StepInput
from trainer_side.ranks.peers import agree
from trainer_side.ranks.uncaught import install_exit_code_hook
from trainer_side.restore.choice import parse_best
from trainer_side.restore.restore import restore
from trainer_side.restore.restore_attempt import Restored, RestoreOptions
from trainer_side.restore.same_data import describe_other_data
from trainer_side.save.finished_step import FinishedStep
from trainer_side.save.host_memory import locked_buffer
from trainer_side.save.metric_values import StepMetrics
from trainer_side.save.saver import gc_paused
from trainer_side.seat import Seat
from trainer_side.start_line import start_line
from trainer_side.state.drill_notes import BatchNotes, CounterNotes
from trainer_side.state.skippable import Skippable
from trainer_side.state.split_kinds import refuse_split_objects
from trainer_side.state.tree import UserState
from trainer_side.trackers.marking import MarkSender
from trainer_side.trackers.tracker import NullTracker, StartPoint, Tracker
from trainer_side.whole_number import STEP_MAX, describe_value, step_number

_log = logging.getLogger("holdfast.trainer")

register_end_report()  # an error of joining the job is reported, too


@opaque_methods
class Checkpointer:
    """Saves checkpoints of a training run, and restores the newest one.

    Every training rank of the job makes one Checkpointer, with the same names and tensors. Making it is collective:
    each rank waits for all the others. All methods must be called on the training thread.

    Args:
        state: Names mapped to objects with `state_dict()` and `load_state_dict()` (modules, optimizers, schedulers,
            samplers, anything that torch.distributed.checkpoint calls Stateful), tensors, plain values, or
            `PerRank(...)` around a value that differs per rank. With DTensors (`fully_shard`, tensor parallelism) each
            rank sends its part, and the checkpoint has whole tensors; `Split(...)` says the same of a tensor that the
            script has split itself. Holdfast assumes that other parameters of modules and tensors of optimizers, each
            under a name of its own, are the same on every rank; it saves rank 0's copy of all else.
        config: Settings. None: from `HOLDFAST_*` in the environment and from `holdfast.toml`.
        every: Number of training steps from one checkpoint of `step()` to the next. 0: only `save()` takes checkpoints.
            `"auto"`: chosen from what checkpoints cost (docs/interval.md). None: the setting `every`. Must be the same
            on every rank.
        fresh: Whether to start from scratch although the run may have checkpoints, and without `restore()`. Steps may
            then be numbered from 0 again: a checkpoint of a later job counts as newer regardless of its step, and the
            older ones stay until retention removes them. A script that is restarted with `fresh=True` starts from
            scratch each time.

    Attributes:
        restored: The checkpoint that `restore()` has restored, and the source of each part. None before `restore()`,
            and on a new run.

    Raises:
        ConfigError: A setting is wrong; the job has neither a stager nor local tiers; or this process has another open
            Checkpointer, or is a forked child of a process that has one.
        StoreError: The stager, or rank 0 of a job without one, cannot use the store; training has not begun.
        FencedError: Another stager writes this run.
        PeerLost: A rank or the stager did not come within `start_seconds_max`.
        StateError: An object in the state is split among the ranks by its class (FSDP1, DeepSpeed,
            `ZeroRedundancyOptimizer`, pipelines); the message names the object and what to do instead.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        *,
        config: TrainerConfig | None = None,
        every: int | Literal["auto"] | None = None,
        fresh: bool = False,
    ) -> None:
        install_exit_code_hook()
        # An exception that the script handles while it makes the Checkpointer does not end the training.
        self._handled_exception = sys.exc_info()[1]
        if not isinstance(state, Mapping):
            raise StateError(f"state: expected a mapping of names to objects, got {describe_value(state)}")
        if not isinstance(config, TrainerConfig | None):
            raise ConfigError(f"config: expected a TrainerConfig, got {describe_value(config)}")
        if not isinstance(fresh, bool):
            raise ConfigError(f"fresh: expected True or False, got {describe_value(fresh)}")
        self._given = UserState(state)
        self._state = self._given.current
        refuse_split_objects(self._state)
        self._config = config or TrainerConfig()
        fixed = chosen_interval(every, self._config)
        self._seat = Seat(self._state)
        self._every = fixed or 0
        self._parts = parts = build(self._given, self._config, auto=fixed is None, fresh=fresh)
        self._link, self._tiers, self._copier = parts.link, parts.tiers, parts.copier
        self._saver, self._leaving, self._pacer = parts.saver, parts.leaving, parts.pacer
        self._agreed_steps, self._events = parts.agreed_steps, parts.events
        self._resume_check = parts.resume_check
        self._counters = CounterNotes(self._state, rank=self.rank)
        self._batches = BatchNotes(self._state)
        self._metrics = StepMetrics(self.rank)
        self._skippable = Skippable(self._state)
        self.restored: Restored | None = None
        self._mark_sender: MarkSender | None = None
        self._closed = self._step_called = self._save_called = self._progress_reported = self._is_chosen = (
            False
        )
        self._finished_step = (
            FinishedStep(self._state, lambda: self._copier.updates) if self._config.watch else None
        )
        report("joined", attempt=self._link.job.attempt or self._tiers.attempt, ranks=self.ranks)
        diary.write_diary("begins", True)
        self._seat.claim(self, self._copier.gate.remove)
        if self.rank == 0:
            # A warning, as for a restore, so that a script without its own logging setup shows the line.
            _log.warning("%s", self._start_line(fixed, fresh=fresh))

    def _start_line(self, every: int | None, *, fresh: bool) -> str:
        job = self._link.job
        attempt = job.attempt or self._tiers.attempt
        return start_line(
            self._config,
            every=every,
            store_url=job.store_url,
            attempt=attempt,
            stagers=job.stagers,
            fresh=fresh,
        )

    @property
    def rank(self) -> int:
        """Number of this rank among the training ranks, from 0."""
        return self._link.job.rank

    @property
    def ranks(self) -> int:
        """Number of training ranks."""
        return self._link.job.ranks

    @property
    def staged_step(self) -> int:
        """Newest step known to survive the death of every training rank; -1 before the first."""
        return self._link.job.staged_step

    @property
    def durable_step(self) -> int:
        """Newest step known to be published in the store; -1 before the first."""
        return self._link.job.durable_step

    @property
    def kept_step(self) -> int:
        """Newest step of this job that every rank has sealed in the same local tier; -1 before the first."""
        return self._tiers.complete_step

    @property
    def notice(self) -> Notice | None:
        """Newest preemption notice that any rank of the job has received; None before the first.

        It changes only inside `step()`, and at the same step on every rank, so that all ranks may leave their training
        loops together.
        """
        return self._agreed_steps.notice

    @property
    def stats(self) -> Stats:
        """Counts of the checkpoints that this rank has begun, ended and declined so far."""
        stats = self._parts.ledger.stats
        stats.stager_losses, stats.stager_lost_seconds = self._link.job.stager_losses
        return stats

    def restore(
        self,
        *,
        step: int | None = None,
        best: str | None = None,
        mode: Literal["min", "max"] | None = None,
        may_lack: Collection[str] = (),
    ) -> int:
        """Restore the state from the newest good checkpoint. Collective: every rank calls it before its first step.

        After `holdfast rewind` this is the newest checkpoint of the new branch, or the one that the run was rewound to;
        then `restored.rewound` says so, and samplers in the state skip the batches that are to be skipped.

        Args:
            step: The step to restore, of the current branch. None: the newest step that is good.
            best: Name of a metric: restore the best good checkpoint of the store by it, from the nearest copy. Training
                continues from there, and its new checkpoints count as newer than all others of the run.
            mode: Whether the lowest (`"min"`) or highest (`"max"`) value of that metric is best. None: as the setting
                `best_mode` was when the checkpoints were written.
            may_lack: Names of the state that the checkpoint may lack, because it was imported or the script is newer.
                Their values stay unchanged, and a warning names them; the next save includes them.

        Returns:
            The number of the step to run next: 0 on a new run, otherwise one more than the saved step.

        Raises:
            ConfigError: `step` is no whole number from 0 on, `best` or `mode` does not fit, `may_lack` has a name that
                is not in the state, or the Checkpointer has `fresh=True`.
            DamageError: The run has checkpoints, but no good one; the message names each with its reason.
            StateError: The checkpoint holds other names or shapes than this state; or batches are to be skipped after
                `holdfast rewind`, and nothing in the state can skip them; or the ranks' samplers are for other data.
            StoreMissing: There is no checkpoint of `step`, or no good one with the metric `best`.
        """
        self._check_call("restore()")
        wanted = parse_best(best, mode, step)
        step = None if step is None else step_number(step, "restore()")
        self._is_chosen = wanted is not None or step is not None
        may_lack_names = self._names_in_state(may_lack)
        self._parts.fresh_run.mark_restored()
        refused = self._given.try_refresh()
        other_data = describe_other_data(self._state, self._parts.peers)
        agree(self._parts.peers, refused or other_data)
        store = open_store(self._link.job.store_url)
        options = RestoreOptions(
            step=step,
            best=wanted,
            seconds_max=self._config.restore_seconds_max,
            without_store=self._config.restore_without_store,
            may_lack=may_lack_names,
            set_aside=self._config.restore_set_aside,
            can_skip=bool(self._skippable),
            allocate_pinned=locked_buffer,
        )
        with gc_paused():
            found = self.restored = restore(
                self._state,
                store,
                self._parts.peers,
                events=self._events,
                tiers=self._tiers.tiers,
                fetch=self._link.fetch,
                options=options,
            )
        if found is None:
            if self.rank == 0:
                _log.warning("a new run: %s has no checkpoint to resume from", self._link.job.store_url)
            emit_progress("restored", step=-1)
            return 0
        self._tiers.set_restored((found.attempt, found.step), found.whole_in)
        self._agreed_steps.on_restored(found.step)
        self._parts.left_out.mark_restored()
        is_other_batch = found.rewound is not None and found.rewound.skips(found.step + 1)
        self._resume_check.set_resumed(
            CheckpointId(found.attempt, found.step),
            found.kept_proofs,
            expected_difference=f"the run was {found.rewound}" if is_other_batch else "",
        )
        self._notify_samplers(found.step)
        if found.rewound is not None:
            self._skippable.skip(found.rewound, self._events, rank=self.rank)
        report("restored", attempt=found.attempt)
        before = {} if found.before is None else {"before": found.before.label}
        emit_progress("restored", step=found.step, attempt=found.attempt, **before)
        return found.step + 1

    def _names_in_state(self, may_lack: Any) -> frozenset[str]:
        names = list(self._state)
        if not isinstance(may_lack, str) and isinstance(may_lack, Iterable):
            given = list(may_lack)  # once: it may be a generator
            if all(name in names for name in given):
                return frozenset(given)
            may_lack = given
        raise ConfigError(f"may_lack: expected names of the state ({', '.join(names)}), got {may_lack!r}")

    def step(
        self,
        step: int,
        *,
        batch: Any = None,
        loss: Any = None,
        grad_norm: Any = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> bool:
        """Tell holdfast that training step `step` (counted from 0) is done; begin a save if one is due.

        A save is due after `every` steps. After a preemption notice another save is due at the step that the stager
        has named for all ranks; in a job without a stager rank 0 names it (docs/spot.md).

        In the first step after a resume, the call is collective: all ranks compare the step with the one that the run
        had made before (docs/trainer.md). `Restored.proof` has the result.

        Args:
            step: The step.
            batch: The data of this rank in the step: tensors, or lists and dictionaries of them. They are read
                only in the first step after a checkpoint and after a resume.
            loss: This rank's loss of the step: a number, or a tensor of one element.
            grad_norm: The norm of the gradient, given like `loss`.
            metrics: As for `save()`, if a save begins. Metrics alone make no save due.

        Returns:
            Whether a save was begun.

        Raises:
            ConfigError: `step` is no whole number from 0 on; and as `save()`.
            ResumeDiffers: The first step after a resume differs, and `on_unproven` is `stop`; raised on every rank.
            PeerLost: The stager is lost, and `on_stager_lost` is `end`; and as `save()`.
        """
        step = self._check_step(step, "step()")
        self._metrics.check_step(metrics, step)
        self._raise_if_stager_lost()
        self._saver.decline_late()
        if not self._step_called:
            self._step_called = True
            emit_progress("stepped", step=step)
        if self._finished_step is not None:
            self._finished_step.note(step)
        diary.write_diary("step", step)
        self._counters.note(step)
        self._batches.note(step)
        self._notify_samplers(step)
        agreed_steps = self._agreed_steps
        instruction = agreed_steps.reach(step)
        every = agreed_steps.current_interval(self._every, step)
        interval_due = bool(every and (step + 1) % every == 0)
        if self._pacer is not None:
            interval_due = self._pacer.reach(step, lambda usual: agreed_steps.current_interval(usual, step))
        if instruction is not None:
            self._events.emit(
                "appointed", {"save": instruction.save, "reason": instruction.reason}, step=step
            )
            if instruction.notice.kind is NoticeKind.TERMINATE:
                report("noticed")  # by now all ranks may leave their loops, whichever received the notice
        proof = self._resume_check.on_step_end(
            step, StepInput(batch, loss, grad_norm), self._leaving.newest_step
        )
        if proof is not None and self.restored is not None:
            self.restored = replace(self.restored, proof=proof)
        self._report_progress()
        save_due = interval_due or (instruction is not None and instruction.save)
        saved = save_due and self.save(step, metrics=metrics)
        if self._leaving.newest_step == step:
            self._resume_check.on_saved(step)
        if self._pacer is not None:
            self._pacer.on_step_end(step, due=save_due, saved=saved)
        return saved

    def save(self, step: int, *, metrics: Mapping[str, Any] | None = None) -> bool:
        """Save a checkpoint of the current state, after step `step`. Returns as soon as training may continue.

        With `on_full="skip"` the call never waits for room. With `"wait"` it waits until fewer than `in_flight_max`
        steps are in flight to the ring, and then until each local tier has a free slot; each wait takes at most
        `full_seconds_max`.

        Args:
            step: The step.
            metrics: Results of an evaluation of this very state: names mapped to real numbers, or to tensors of one
                element. Rank 0's are saved with the checkpoint, and other ranks' are not read. A value that is not
                finite is left out.

        Returns:
            False if this rank declines the step: all staging areas are still being sent, or the stager is lost and
            there are no local tiers. If training ends here, a step for which there was no room is not declined: the end
            of the `with` block waits until it can be saved. True if this rank has begun the step, for the stager or for
            a tier. The step may still fail: another rank may decline it, this rank's copy may fail, or plain values may
            outgrow the space that is reserved for them. `stats` counts each of these.

        Raises:
            StateError: The state cannot be saved, or the ranks' states differ; the message names the place.
            ConfigError: `step` is no whole number from 0 on; `metrics` has a wrong name or value; `host_bytes_max` is
                less than one staging area takes; or, at the first save, the run has checkpoints, and the script has
                neither called `restore()` nor set `fresh=True`.
            StoreError: At the first save without either, the store cannot be asked whether the run has checkpoints.
            PeerLost: A rank did not answer while the ranks agreed on a new layout; or the stager is lost, and
                `on_stager_lost` is `end`.
        """
        step = self._check_step(step, "save()")
        values = None if metrics is None else self._metrics.values_for_save(metrics, step)
        self._raise_if_stager_lost()
        self._save_called = True
        if self._finished_step is not None and step != self._finished_step.step:
            self._finished_step.note(step)  # for a script that does not call step()
        self._notify_samplers(step)
        self._report_progress()
        saved = self._saver.save(step, metrics=values or None)
        if saved and values is not None:
            self._metrics.mark_saved()
        self._leaving.wanted_step = max(self._leaving.wanted_step, step)
        if saved:
            self._leaving.newest_step = step
        return saved

    def wait_copied(self) -> None:
        """Wait until the last `save()` has copied the whole state, at most `copy_seconds_max`. Not collective.

        After this call any code may change the state until the next save. Call it only before changes that no
        `optimizer.step()` makes: swapping in averaged weights, `load_state_dict`, clipping of weights, or
        `optimizer.eval()` of a schedule-free optimizer.
        """
        self._check_call("wait_copied()")
        self._copier.wait_copied()

    def changing(self) -> AbstractContextManager[None]:
        """Context for changes that no `optimizer.step()` makes: `with checkpointer.changing(): …`.

        Entering it calls `wait_copied()`. A `save()` inside it takes the state as it is at that moment, and returns
        only when the state is copied.
        """
        self._check_call("changing()")
        return OpaqueContext(self._copier.changing())

    def track(self, begin: Callable[[StartPoint], Tracker]) -> Tracker:
        """Mark checkpoints in an experiment tracker, and record its run in each. Every rank, after `restore()`.

        Scripts call `start_wandb`, `start_tensorboard` or `start_mlflow` of `holdfast.integrations.trackers`; this is
        for trackers of another kind.

        Args:
            begin: Makes the tracker, in the run that the start point names, if any. Called on rank 0.

        Returns:
            The tracker that `begin` has made; on other ranks one that does nothing.

        Raises:
            ConfigError: `restore()` was not called, so the run to continue is not known yet, and the Checkpointer does
                not have `fresh=True`; or the tracker's `kind` or `run_id` is longer than 1024 characters.
        """
        self._check_call("track()")
        if not self._parts.fresh_run.has_chosen:
            raise ConfigError(
                "an experiment tracker was started before restore(), so the run to continue is not known yet; call "
                "restore() of the Checkpointer first, or say Checkpointer(..., fresh=True)"
            )
        if self.rank:
            return NullTracker()
        start = self._start_point()
        tracker = begin(start)
        if not is_trackers(named := {tracker.kind: tracker.run_id}):
            raise ConfigError(
                f"tracker: expected a kind and a run_id of at most 1024 characters, got {named}"
            )
        if self._mark_sender is None:
            self._mark_sender = MarkSender()
            self._events.add_listener(self._mark_sender.handle_event)
        self._mark_sender.add(tracker, start.marks(tracker.last_step))
        self._saver.trackers |= named
        return tracker

    def _start_point(self) -> StartPoint:
        attempt, found = self._link.job.attempt or self._tiers.attempt, self.restored
        if found is None:
            return StartPoint(0, attempt)
        text = f"attempt {attempt} resumed from step {found.step} of attempt {found.attempt}"
        if found.sources:
            text += f", read from {', '.join(found.sources)}"
        if found.rewound is not None:
            text += f"; {found.rewound}"
        branched = self._is_chosen or found.rewound is not None
        return StartPoint(found.step + 1, attempt, found.trackers, text, branched=branched)

    def close(self) -> None:
        """Wait until every step that was begun is durable (at most `close_seconds_max`), then leave the job.

        A second call does nothing, and neither does one in a forked child. Leaving the `with` block calls it. If an
        exception ends the block, or `close()` is called in a `finally` or `except` clause because of one, the exception
        is logged first, and the call waits only until all steps in flight are staged, at most 10 s.

        Raises:
            PeerLost: A thread of this rank had died, so that checkpoints are missing.
            NotDurable: The newest step that was to be saved is not durable, and `on_not_durable` is not `warn`.
        """
        error = sys.exc_info()[1]
        self._leave(None if error is self._handled_exception else error)

    def _leave(self, error: BaseException | None) -> None:
        """Leave the job, once. `error`: The exception that has ended the training, if any."""
        if self._closed or os.getpid() != self._seat.process:
            return
        if isinstance(error, SystemExit) and not error.code:
            error = None  # a finished script may end by sys.exit() or sys.exit(0)
        self._closed = True
        self._seat.release()
        failed = self._save_deferred() if error is None else None
        error = error or failed
        if error is not None:
            self._leaving.log_exception(error)
            notice = None if isinstance(error, GeneratorExit) else self._parts.notices.pending
            if (
                notice is not None
                and self._finished_step is not None
                and not self._leaving.has_lost_peer(error)
            ):
                self._leaving.save_last(self._finished_step, self._saver.save, notice)
            self._saver.decline_late()
        elif self._step_called and not self._save_called and self.rank == 0 and self._pacer is None:
            _log.warning(
                "no checkpoint was taken: %s, and save() was not called; give Checkpointer(..., every=N), or call it",
                f"step() saves after every {self._every} steps, which were not reached"
                if self._every
                else "every=0",
            )
        self._resume_check.close()
        self._parts.notices.close()
        if self._pacer is not None:
            self._pacer.close()
        self._parts.left_out.close()
        self._parts.pool.close()
        try:
            if error is None:
                self._leaving.leave_after_training()
            else:
                self._leaving.leave_after_error(error)
        finally:
            self._parts.cancel_at_exit()
            if summary := self._parts.ledger.summary():
                _log.warning("rank %d: %s", self.rank, summary)
            self._report_progress()
            if self._mark_sender is not None:
                self._mark_sender.close()
            self._events.close()
        if failed is not None:
            raise failed

    def _save_deferred(self) -> BaseException | None:
        """Save the last step if it found no room before; return the error of that, if any."""
        try:
            saved = self._saver.save_late(self._config.close_seconds_max)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - raised at the end of `_leave`
            return error
        self._leaving.newest_step = max(self._leaving.newest_step, saved)
        return None

    def _check_step(self, step: int, call: str) -> int:
        """Check a step that a script passes to `call`. Raises `ConfigError` as `step_number` and `_check_call` do."""
        self._check_call(call)
        return step if type(step) is int and 0 <= step <= STEP_MAX else step_number(step, call)

    def _check_call(self, call: str) -> None:
        """Raises `ConfigError` in a forked child."""
        if os.getpid() != self._seat.process:
            raise self._seat.fork_error(call)

    def _notify_samplers(self, step: int) -> None:
        """Tell samplers in the state that a step is done."""
        for stepped in self._skippable.step_callbacks:
            stepped(step)

    def _raise_if_stager_lost(self) -> None:
        """End the training if the stager is lost and `on_stager_lost` is `end`."""
        problem = self._link.job.problem
        if problem is not None and self._config.on_stager_lost == "end":
            _log.error("rank %d: the training ends, because on_stager_lost is end", self.rank)
            raise problem

    def _report_progress(self) -> None:
        if not self._progress_reported and max(self.staged_step, self.durable_step, self.kept_step) >= 0:
            self._progress_reported = True
            report("staged")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error)
