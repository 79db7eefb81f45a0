"""The pacer: decides in `Checkpointer.step()` when to save with `every="auto"`. Rank 0 measures and asks; all obey.

    events of this rank (save, staged, durable, declined, failed) ─► queue ─┐
    step() ── reach ─► Schedule: is it time?                                ▼
           └─ on_step_end ────────────────────────────────────────► Profile ─► Governor ─► WISH

The pacer listens to the event log, so no part of a save depends on it.
"""

from __future__ import annotations

import logging
import resource
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from holdfast.config import TrainerConfig
from holdfast.policy.governor import Governor
from holdfast.policy.hazard import Hazard
from holdfast.telemetry.events import EventLog
from holdfast.wire.failure_count import FailureCount
from holdfast.wire.pace import PaceRequest
from trainer_side.opaque import is_fake_mode, opaque
from trainer_side.pace.schedule import Schedule, SchedulePhase
from trainer_side.pace.step_profile import StepProfile

_log = logging.getLogger("holdfast.trainer.pace")
_PENDING_EVENTS_MAX = 1000  # they pile up if a script never calls `step()`
_ENDED = frozenset({"durable", "declined", "failed"})


class Pacer:
    """Paces the saves of this rank. Training thread; events come from any thread. `send_request`: Sends a request to
    the stager; None: another rank measures. `optimizers`: Their steps are timed until the first checkpoint. `observed`:
    The failures of the run before this job, unless `mtbf_hours` is set; its time counts from its first checkpoint.
    """

    def __init__(
        self,
        schedule: Schedule,
        send_request: Callable[[PaceRequest], None] | None,
        config: TrainerConfig,
        events: EventLog,
        optimizers: Sequence[Optimizer],
        *,
        observed: FailureCount,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._schedule, self._send_request, self._events = schedule, send_request, events
        self._profile = StepProfile(clock)
        self._config, self._observed, self._clock = config, observed, clock
        self._saved_at: float | None = None  # when the first save began
        self._governor = Governor(
            self._hazard(), overhead_max=config.overhead_max, every_seconds_max=config.every_seconds_max
        )
        self._due_step = -1
        self._pending_events: deque[tuple[str, Mapping[str, Any], int | None]] = deque(
            maxlen=_PENDING_EVENTS_MAX
        )
        self._updates = UpdateTimes(optimizers if send_request is not None else ())
        self._profiled = False
        self._new_outcomes = 0  # news about checkpoints since the last `_consider`
        if send_request is not None:
            events.add_listener(
                lambda event, fields, step: self._pending_events.append((event, fields, step))
            )

    def reach(self, step: int, shorten: Callable[[int], int]) -> bool:
        """Note that training has done `step`; return whether a save is due."""
        if self._send_request is not None:
            self._profile.begin_iteration()
            if (seconds := self._updates.pop_seconds()) > 0:
                self._profile.record_update(seconds)
            self._consider(self._send_request)
        due = self._schedule.reach(step, shorten)
        if due:
            self._due_step = step
            self._updates.remove()
        return due

    def on_step_end(self, step: int, *, due: bool, saved: bool) -> None:
        """Note at the end of `step()` whether a save was due in it, and whether it was begun."""
        if self._send_request is None:
            return
        if due and self._profile.has_in_flight:
            self._new_outcomes += 1  # its time is unknown yet, but longer than the interval
        if saved:
            self._profile.record_save(step)
            self._saved_at = self._clock() if self._saved_at is None else self._saved_at
        elif due:
            self._profile.record_decline()

    def close(self) -> None:
        self._updates.remove()

    def _consider(self, send_request: Callable[[PaceRequest], None]) -> None:
        """Take in the events; reconsider the interval if they tell something about checkpoints."""
        outcomes, self._new_outcomes = self._new_outcomes, 0
        while self._pending_events:
            event, fields, step = self._pending_events.popleft()
            self._handle_event(event, fields, -1 if step is None else step)
            outcomes += event in _ENDED
        if not (outcomes and self._profile.has_cost):
            return
        if not self._profiled:
            self._profiled = True
            peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            self._events.emit("profile", self._profile.fields(peak_bytes))
            _log.info("profile of this training:\n%s", self._profile.table(peak_bytes))
        paced = self._schedule.phase is SchedulePhase.PACED
        self._governor.hazard = hazard = self._hazard()
        change = self._governor.consider(self._profile.cost(), self._schedule.every if paced else None)
        if change is not None:
            send_request(
                PaceRequest(change.advice.every, self._due_step, f"{change.describe()}; {hazard.description}")
            )

    def _hazard(self) -> Hazard:
        config = self._config
        if config.mtbf_hours is not None:
            return Hazard.from_mtbf(config.mtbf_hours, config.dollars_per_hour)
        since = 0.0 if self._saved_at is None else self._clock() - self._saved_at
        return Hazard.from_observed(self._observed.with_attempt(since, failed=False), config.dollars_per_hour)

    def _handle_event(self, event: str, fields: Mapping[str, Any], step: int) -> None:
        profile = self._profile
        match event:
            case "plan":
                profile.image_bytes, profile.slice_bytes = fields["image_bytes"], fields["slice_bytes"]
                profile.in_flight_max = fields["in_flight_max"]
            case "save":
                waited = fields.get("wait_seconds") or 0.0
                stall = fields["cst_seconds"]
                profile.record_copy(step, fields["slice_bytes"], fields["copy_seconds"], stall, waited)
            case "staged":
                profile.record_staged(step, fields["staged_seconds"])
            case "durable":
                profile.record_durable(step, fields["durable_seconds"])
            case "declined" | "failed":
                profile.record_end(step)


class UpdateTimes:
    """Sums the times of the optimizers' steps, from a hook before to a hook after each, until the first checkpoint is
    due. Training thread. On a device these are the times of the calls, not of the kernels: the gate holds back calls.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._started_at: dict[int, float] = {}
        self._seconds = 0.0
        self._hooks: list[RemovableHandle] = []
        for optimizer in optimizers:
            if not hasattr(optimizer, "_optimizer_step_post_hooks"):
                continue  # its class never calls `Optimizer.__init__`
            self._hooks.append(optimizer.register_step_pre_hook(self._before))
            self._hooks.append(optimizer.register_step_post_hook(self._after))

    def pop_seconds(self) -> float:
        """Return the seconds of steps since the last call; 0 if no optimizer has stepped."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def remove(self) -> None:
        """Take the hooks off the optimizers. Safe to call twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @opaque
    def _before(self, optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if not is_fake_mode():
            self._started_at[id(optimizer)] = time.perf_counter()

    @opaque
    def _after(self, optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        begun = self._started_at.pop(id(optimizer), None)
        if begun is not None:
            self._seconds += time.perf_counter() - begun
