"""Attempts of a run: when each began, trained and ended, and why; from `holdfast run`'s lines, or from the stager's.

launched ─► joined ─► restored ─► training ─► lost ─► ended          the supervisor's (status.jsonl)
                                              rank_lost              the stager's, sometimes seconds earlier
stager_ready ─────► restore ─────────────────► stager_ended | stager_gone       without a supervisor: less is known
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from holdfast.telemetry.event_reading import TIME_MAX, LoggedEvent, as_int, as_number, as_text
from holdfast.wire.step_proof import ResumeProof
from operator_side.supervise.record import MARKS
from operator_side.supervise.verdict import Cause

_PHASES = tuple(f"{mark}_seconds" for mark in MARKS[1:])
_WELL = frozenset({Cause.DONE.value, Cause.STOPPED.value})
_LEFT = "left"


@dataclass(slots=True)
class ReportedAttempt:
    """One start of the job."""

    number: int
    is_supervised: bool  # a supervisor reports it; otherwise it is derived from events of stager and ranks
    began_at_unix: float  # when it was launched; without a supervisor, when its stager was ready
    last_seen_at_unix: float  # the last sign of life
    ranks: int | None = None
    hosts: list[str] = field(default_factory=list)
    training_at_unix: float | None = None  # first step of all ranks; else restore or first `save()`
    restored_attempt: int | None = None
    restored_step: int | None = None  # that it resumed from; -1: the beginning; None: unknown
    proof: ResumeProof | None = None  # its first step beside the attempt before; None: never compared
    lost_at_unix: float | None = None  # the first sign of its bad end
    ended_at_unix: float | None = None  # time of the verdict
    loss_reason: str = ""
    cause: str = ""  # the supervisor's word; `left`: the trainers left the stager; "" while it runs
    message: str = ""
    phases: dict[str, float] = field(default_factory=dict)  # seconds from launch to training, by phase

    @property
    def ended_well(self) -> bool:
        return self.cause in _WELL or self.cause == _LEFT

    @property
    def was_lost(self) -> bool:
        return bool(self.cause) and not self.ended_well

    @property
    def stopped_at_unix(self) -> float:
        ended = self.last_seen_at_unix if self.ended_at_unix is None else self.ended_at_unix
        return ended if self.lost_at_unix is None or not self.was_lost else self.lost_at_unix


def gather_attempts(events: Sequence[LoggedEvent]) -> list[ReportedAttempt]:
    """Return all attempts, oldest first."""
    is_supervised = any(event.event == "launched" and event.role == "supervisor" for event in events)
    attempts: list[ReportedAttempt] = []
    for event in events:
        if event.event == "resume_proof" and attempts:
            with suppress(ValueError):  # a broken line
                attempts[-1].proof = ResumeProof.from_json(event.fields)
        if is_supervised:
            _from_supervisor(event, attempts)
        else:
            _from_stager(event, attempts)
    if not is_supervised:
        for one in attempts[:-1]:
            if not one.cause:  # the logs lack the end of this attempt
                one.cause, one.message = "lost", "the logs have no end of this attempt"
    return attempts


def _from_supervisor(event: LoggedEvent, attempts: list[ReportedAttempt]) -> None:
    if event.role != "supervisor":
        if attempts and event.event == "restore":
            attempts[-1].restored_attempt = as_int(event.fields.get("attempt"))
        if attempts and not attempts[-1].cause:
            attempts[-1].last_seen_at_unix = event.time
            if event.event == "rank_lost" and attempts[-1].lost_at_unix is None:
                attempts[-1].lost_at_unix = event.time
        return
    if event.event == "launched":
        attempts.append(_new_attempt(event, attempts, is_supervised=True))
        hosts = event.fields.get("hosts")
        if isinstance(hosts, list):
            attempts[-1].hosts = [as_text(host) for host in hosts]
    elif attempts:
        _apply_supervisor_event(event, attempts[-1])


def _new_attempt(
    event: LoggedEvent, before: Sequence[ReportedAttempt], *, is_supervised: bool
) -> ReportedAttempt:
    number, ranks = as_int(event.fields.get("attempt")), as_int(event.fields.get("ranks"))
    return ReportedAttempt(number or len(before) + 1, is_supervised, event.time, event.time, ranks)


def _apply_supervisor_event(event: LoggedEvent, attempt: ReportedAttempt) -> None:
    """Apply a further event to the attempt that was launched last."""
    if not attempt.cause:
        attempt.last_seen_at_unix = event.time
    match event.event:
        case "restored":
            attempt.restored_step = as_int(event.fields.get("step"), least=-1)
            attempt.restored_attempt = as_int(event.fields.get("of_attempt")) or attempt.restored_attempt
        case "training":
            attempt.training_at_unix = event.time
            values = {name: as_number(event.fields.get(name)) for name in _PHASES}
            attempt.phases = {
                name.removesuffix("_seconds"): value for name, value in values.items() if value is not None
            }
        case "lost" | "ending" if not attempt.loss_reason:
            attempt.loss_reason = as_text(event.fields.get("message"))
            if attempt.lost_at_unix is None:
                attempt.lost_at_unix = event.time
        case "ended":
            attempt.ended_at_unix = event.time
            attempt.cause = as_text(event.fields.get("cause")) or "not known"
            attempt.message = as_text(event.fields.get("message")).removeprefix(f"attempt {attempt.number}: ")


def _from_stager(event: LoggedEvent, attempts: list[ReportedAttempt]) -> None:
    if event.event == "stager_ready":
        attempts.append(_new_attempt(event, attempts, is_supervised=False))
        return
    if not attempts:
        return
    attempt = attempts[-1]
    if event.role in {"trainer", "stager"} and not attempt.cause:
        attempt.last_seen_at_unix = event.time
    match event.event:
        case "restore" if event.role == "trainer":
            attempt.training_at_unix = event.time
            attempt.restored_attempt, attempt.restored_step = as_int(event.fields.get("attempt")), event.step
        case "save" if attempt.training_at_unix is None:
            saved = as_number(event.fields.get("saved_at_unix"), TIME_MAX)
            attempt.training_at_unix = event.time if saved is None else saved
        case "staged" if event.role == "stager" and attempt.training_at_unix is None:
            # The ranks' logs are elsewhere, as under torchrun: the stager only knows the time of their first `save()`.
            attempt.training_at_unix = event.time - (as_number(event.fields.get("pgt1_seconds")) or 0.0)
        case "resume_proof" if attempt.restored_step is None:
            attempt.restored_attempt, attempt.restored_step = as_int(event.fields.get("attempt")), event.step
        case "rank_lost" if not attempt.loss_reason:
            attempt.lost_at_unix = event.time
            attempt.loss_reason = as_text(event.fields.get("reason")) or "a rank was lost"
        case "stager_ended" if not attempt.cause:
            attempt.cause, attempt.ended_at_unix = "lost" if attempt.loss_reason else _LEFT, event.time
            attempt.message = attempt.loss_reason or "the trainers have left the stager"
        case "stager_gone" if not attempt.cause and event.fields.get("finished") is False:
            attempt.cause, attempt.lost_at_unix, attempt.ended_at_unix = "lost", event.time, event.time
            attempt.message = "the stager was lost before it had finished"
