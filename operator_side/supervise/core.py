"""Decides what the supervisor does next. A pure state machine: events in, actions out, the caller passes the time.

              ┌──────────────────────── enough hosts ◄────────────────────────────┐
              ▼                                                                   │
    FINDING ─► RUNNING ── silent, host gone, stop ─► ENDING ── mpirun has ended ─► JUDGING ─► PAUSING
                  └────────────── mpirun has ended ──────────────────────────────▲│
                                                                                  └─► OVER

    JUDGING      ask the fleet once more, unless a host is known to be gone, to tell a preemption from a bug
    PAUSING      no pause after an attempt that made progress; otherwise a random time, which doubles with each restart
                 in a row without a newer step (limits.py)

The next attempt does not wait until the staged steps of the last one are durable: it restores them from the ring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.shares import WHOLE
from holdfast.wire.step_proof import ProofVerdict
from operator_side.supervise.hosts import Host, place_ranks
from operator_side.supervise.limits import Limits, RestartPolicy
from operator_side.supervise.record import AttemptRecord, Resumption
from operator_side.supervise.supervisor_messages import (
    Action,
    AllJoined,
    ClockTick,
    Event,
    Finish,
    HostsSeen,
    KillAttempt,
    Launch,
    MpirunExited,
    Note,
    PollFleet,
    ProcessExited,
    ProcessStarted,
    RankDead,
    RankNoticed,
    RankRestored,
    RankSilence,
    RankStepped,
    ResumeCompared,
    RetainCheckpoint,
    StepDurable,
    StepStaged,
    Stop,
    Terminate,
)
from operator_side.supervise.suspicion import SetAside, Suspicion
from operator_side.supervise.verdict import INTERRUPTED, MEMORY_KILL, Cause, Death, Verdict, judge

_NEW_RUN = "no checkpoint to restore, a new run begins"


class SupervisorPhase(StrEnum):
    FINDING = "finding hosts"
    RUNNING = "running"
    ENDING = "ending"
    JUDGING = "judging"
    PAUSING = "pausing"
    OVER = "over"


class Core:
    """The state machine. Not thread-safe. `pause_seconds`: random pause before restart n (1, 2, …) in a row without
    progress. `newest_step`: newest staged, durable or restored step, not set aside; starts as the store's, or -1.
    """

    def __init__(
        self,
        limits: Limits,
        pause_seconds: Callable[[int], float],
        *,
        first_attempt: int = 1,
        newest_step: int = -1,
        now: float = 0.0,
    ) -> None:
        self._limits, self._pause_seconds = limits, pause_seconds
        self.phase = SupervisorPhase.FINDING
        self.newest_step = newest_step
        self._next_attempt = first_attempt
        self._attempt: AttemptRecord | None = None
        self._deadline = now + limits.hosts_seconds_max
        self._has_terminated = self._has_killed = False  # asked mpirun to end the job; killed mpirun
        self._stopping = ""
        self._restart_policy, self._suspicion = RestartPolicy(limits), Suspicion(limits)
        self._has_logged_waiting = False
        self._resumption = Resumption()

    def begin(self) -> list[Action]:
        return [PollFleet()]

    def handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case StepStaged(step, share):
                if self._attempt.record_staged(step, share) if self._attempt is not None else share == WHOLE:
                    self._record_progress(step, now)
            case StepDurable(step, of_attempt):
                if not CheckpointId(of_attempt, step).is_set_aside(self._suspicion.set_aside):
                    self._record_progress(step, now)
            case Stop(reason):
                return self._handle_stop(reason, now)
            case HostsSeen(hosts):
                return self._handle_hosts(hosts, now)
            case MpirunExited(status):
                return self._handle_exit(status, now)
            case ResumeCompared(_, step, proof):
                is_warning = proof.verdict is ProofVerdict.DIFFERS
                return [
                    Note("resume_proof", proof.text, {"step": step, **proof.to_json()}, is_warning=is_warning)
                ]
            case ClockTick():
                return self._handle_tick(now)
            case _:
                return self._handle_attempt_event(event, now)
        return []

    # -- an attempt ------------------------------------------------------------------------------------------------

    def _handle_attempt_event(self, event: Event, now: float) -> list[Action]:
        attempt = self._attempt
        if attempt is None:
            return []
        match event:
            case ProcessStarted(rank, host):
                attempt.rank_hosts[rank] = host
            case AllJoined() if attempt.record_joined():
                return self._record_mark("joined", "all ranks and stagers have joined", {}, now)
            case RankRestored(rank, step, of_attempt, fallback) if attempt.record_rank(
                attempt.restored, rank
            ):
                fields = {"step": step}
                self.newest_step = max(self.newest_step, step)  # a step from a ring may not be durable
                if step >= 0 and of_attempt > 0:
                    attempt.restored_from, attempt.fallback = CheckpointId(of_attempt, step), fallback
                    fields["of_attempt"] = of_attempt
                how = f"every rank has restored step {step}" if step >= 0 else _NEW_RUN
                return self._record_mark("restored", how, fields, now)
            case RankStepped(rank, step) if attempt.record_rank(attempt.stepped, rank):
                return self._handle_training(attempt, step, now)
            case ProcessExited():
                return self._handle_death(attempt, event, now)
            case RankSilence(rank, is_over):
                if is_over:
                    attempt.silent_since.pop(rank, None)
                else:
                    attempt.silent_since.setdefault(rank, now)
            case RankDead(rank) if self.phase is SupervisorPhase.RUNNING:
                attempt.record_lost_rank(rank, now)
                self._resumption.record_loss(now)
            case RankNoticed(rank):
                attempt.noticed_hosts.add(attempt.rank_hosts.get(rank, f"of rank {rank}"))
        return []

    def _handle_death(self, attempt: AttemptRecord, event: ProcessExited, now: float) -> list[Action]:
        by_supervisor = self.phase is SupervisorPhase.ENDING
        attempt.deaths.append(
            Death(event.rank, event.status, event.exception, by_supervisor, out_of_memory=event.out_of_memory)
        )
        has_lost_stagers = event.rank >= attempt.ranks and attempt.stagers_ended()
        if attempt.first_death_at is not None or not (event.status or has_lost_stagers):
            return []
        attempt.first_death_at = now
        if by_supervisor or not event.status:
            return []
        self._resumption.record_loss(now)
        message = f"attempt {attempt.number}: {attempt.name(event.rank)} has ended with status {event.status}"
        if event.out_of_memory:
            message += f"; {MEMORY_KILL}"
        fields = {"attempt": attempt.number, "rank": event.rank, "status": event.status}
        return [Note("lost", message, fields)]

    def _record_mark(self, mark: str, message: str, fields: Mapping[str, Any], now: float) -> list[Action]:
        assert self._attempt is not None
        self._resumption.record_mark(mark, now)
        number = self._attempt.number
        return [Note(mark, f"attempt {number}: {message}", {"attempt": number, **fields})]

    def _handle_training(self, attempt: AttemptRecord, step: int, now: float) -> list[Action]:
        phases = self._resumption.record_training(now)
        message = (
            f"attempt {attempt.number}: training again after {phases['seconds']:.1f} s: step {step} is done"
        )
        return [Note("training", message, {"attempt": attempt.number, "step": step, **phases})]

    def _record_progress(self, step: int, now: float) -> None:
        if step <= self.newest_step:
            return
        self.newest_step = step
        if self._attempt is not None:
            self._attempt.progressed, self._attempt.progress_at = True, now

    def _handle_tick(self, now: float) -> list[Action]:
        attempt = self._attempt
        if self.phase is SupervisorPhase.RUNNING and attempt is not None:
            reason = attempt.reason_to_end(self._limits, now)
            return self._end_attempt(reason, now) if reason else []
        if self.phase is SupervisorPhase.ENDING and attempt is not None:
            return self._escalate(attempt, now)
        if now < self._deadline:
            return []
        match self.phase:
            case SupervisorPhase.JUDGING:
                return self._judge(now)  # the fleet does not answer: judge without it
            case SupervisorPhase.PAUSING:
                self.phase, self._deadline = SupervisorPhase.FINDING, now + self._limits.hosts_seconds_max
                self._has_logged_waiting = False
                return [PollFleet()]
            case SupervisorPhase.FINDING:
                needed, waited = self._limits.ranks_min, self._limits.hosts_seconds_max
                message = f"no hosts for {needed} ranks were found within {waited:g} s"
                return self._finish(Verdict(Cause.LOST, message, "no hosts", exit_code=9))
        return []

    # -- ending an attempt -----------------------------------------------------------------------------------------

    def _end_attempt(self, reason: str, now: float) -> list[Action]:
        assert self._attempt is not None
        if not self._stopping:
            self._attempt.give_up_reason = reason
            if self._attempt.first_death_at is None:
                self._resumption.record_loss(now)
        self.phase = SupervisorPhase.ENDING
        # Ranks that have lost a peer cannot save again. Ranks told to stop still can, so ask them first.
        gently = bool(self._stopping)
        self._deadline = now + (self._limits.grace_seconds if gently else self._limits.kill_seconds)
        self._has_terminated, self._has_killed = not gently, False
        return [Note("ending", reason, {"attempt": self._attempt.number}, is_warning=True), Terminate(gently)]

    def _escalate(self, attempt: AttemptRecord, now: float) -> list[Action]:
        late = now >= self._deadline
        if not self._has_terminated:
            return self._terminate_mpirun(now) if late else []
        if not late and (self._has_killed or not attempt.waits_for_lost_hosts()):
            return []
        self._has_killed, self._deadline = True, now + self._limits.kill_seconds
        return [KillAttempt()]

    def _terminate_mpirun(self, now: float) -> list[Action]:
        self._has_terminated, self._deadline = True, now + self._limits.kill_seconds
        return [Terminate(gently=False)]

    def _handle_exit(self, status: int, now: float) -> list[Action]:
        assert self._attempt is not None
        self._attempt.mpirun_status = status
        if self._attempt.lost_hosts:  # this decides the verdict; asking the fleet again would only delay it
            return self._judge(now)
        self.phase, self._deadline = SupervisorPhase.JUDGING, now + self._limits.fleet_seconds_max
        return [PollFleet()]

    # -- hosts -----------------------------------------------------------------------------------------------------

    def _handle_hosts(self, hosts: tuple[Host, ...] | None, now: float) -> list[Action]:
        attempt = self._attempt
        missed = attempt is not None and attempt.record_hosts(hosts)
        if self.phase is SupervisorPhase.RUNNING and attempt is not None and attempt.lost_hosts:
            return self._end_attempt(f"host {', '.join(sorted(attempt.lost_hosts))} is gone", now)
        if missed:
            return [PollFleet()]  # look again now: a host missed twice in a row is gone
        if self.phase is SupervisorPhase.JUDGING:
            return self._judge(now)
        if self.phase is SupervisorPhase.FINDING:
            return self._launch(hosts, now)
        return []

    def _launch(self, hosts: tuple[Host, ...] | None, now: float) -> list[Action]:
        limits = self._limits
        placed: tuple[Host, ...] | None = None
        ranks = limits.ranks
        if hosts is not None:
            placed = place_ranks(hosts, limits.ranks)
            ranks = sum(host.slots for host in placed)
        if ranks < limits.ranks_min:
            if self._has_logged_waiting:
                return []  # the fleet watch keeps looking, and keeps requesting hosts
            self._has_logged_waiting = True
            message = f"there are hosts for {ranks} ranks, and at least {limits.ranks_min} are needed; waiting for more"
            note = Note("waiting", message, {"ranks": ranks}, is_warning=True)
            return [note, PollFleet(limits.ranks - ranks)]
        self._attempt = AttemptRecord(self._next_attempt, ranks, placed, now, limits.stagers)
        self._resumption.record_mark("launched", now)
        self._next_attempt += 1
        self.phase = SupervisorPhase.RUNNING
        number = self._attempt.number
        names = None if placed is None else [f"{host.name}:{host.slots}" for host in placed]
        fields = {"attempt": number, "ranks": ranks, "hosts": names, "newest_step": self.newest_step}
        where = "on this machine" if names is None else "on " + ", ".join(names)
        newest = f"newest step {self.newest_step}" if self.newest_step >= 0 else "no checkpoint yet"
        note = Note("launched", f"attempt {number}: starting {ranks} ranks {where}, {newest}", fields)
        return [note, Launch(number, ranks, placed, self._suspicion.set_aside)]

    # -- the end of an attempt -------------------------------------------------------------------------------------

    def _judge(self, now: float) -> list[Action]:
        attempt = self._attempt
        assert attempt is not None
        self._attempt = None
        self._resumption.record_mark("ended", now)
        verdict = judge(attempt.evidence(stopping=bool(self._stopping)))
        fields = {
            "attempt": attempt.number,
            "cause": verdict.cause.value,
            "rank": verdict.rank,
            "exit_code": verdict.exit_code,
            "progressed": attempt.progressed,
            "newest_step": self.newest_step,
            "seconds": round(now - attempt.begun_at, 3),
        }
        note = Note(
            "ended", f"attempt {attempt.number}: {verdict.message}", fields, verdict.cause is not Cause.DONE
        )
        if verdict.cause in {Cause.DONE, Cause.STOPPED}:
            return [note, *self._finish(verdict)]
        found = self._suspicion.check_attempt(verdict, attempt)
        final_verdict = self._restart_policy.final_verdict(
            verdict, progressed=attempt.progressed, may_set_aside=self._suspicion.is_open
        )
        if final_verdict is not None:
            return [note, *self._finish(self._suspicion.explain(final_verdict))]
        return [note, *self._set_aside(attempt.number, found, verdict), *self._pause(now)]

    def _set_aside(self, number: int, found: SetAside | None, verdict: Verdict) -> list[Action]:
        if found is None:
            return []
        key, fallback, crashes = found
        self._suspicion.record_set_aside(found, verdict.signature)
        self.newest_step = fallback.step  # any step beyond this one counts as progress again
        message = (
            f"{key} is set aside: {crashes} attempts that were restored from it crashed the same way "
            f"({verdict.message}); the next attempt goes back to {fallback}"
        )
        fields = {
            "attempt": number,
            "step": key.step,
            "of_attempt": key.attempt,
            "before_step": fallback.step,
            "before_attempt": fallback.attempt,
            "crashes": crashes,
        }
        return [Note("set_aside", message, fields, is_warning=True), RetainCheckpoint(key)]

    def _pause(self, now: float) -> list[Action]:
        pause_seconds = self._pause_seconds(self._restart_policy.restarts)
        self.phase, self._deadline = SupervisorPhase.PAUSING, now + pause_seconds
        fields = {"pause_seconds": round(pause_seconds, 3)}
        when = f"in {pause_seconds:.1f} s" if pause_seconds else "at once"
        return [Note("relaunching", f"the job is restarted {when}", fields), *self._handle_tick(now)]

    def _handle_stop(self, reason: str, now: float) -> list[Action]:
        is_repeated, self._stopping = bool(self._stopping), reason
        if self.phase is SupervisorPhase.RUNNING:
            return self._end_attempt(reason, now)
        if self.phase is SupervisorPhase.ENDING:
            # A second signal: end without waiting for the ranks.
            return self._terminate_mpirun(now) if is_repeated and not self._has_terminated else []
        if self.phase in {SupervisorPhase.JUDGING, SupervisorPhase.OVER}:
            return []
        return self._finish(
            Verdict(Cause.STOPPED, f"{reason} between two attempts", "stopped", exit_code=INTERRUPTED)
        )

    def _finish(self, verdict: Verdict) -> list[Action]:
        self.phase = SupervisorPhase.OVER
        return [Finish(verdict)]
