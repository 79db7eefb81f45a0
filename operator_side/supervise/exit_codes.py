"""The exit code of `holdfast rank`: 75 for "run me again", 0 for done, and others for bugs. Pure.

how the command ended, the ranks' reports, the end of its stderr, signals ─► CommandOutcome ─► Evidence ─► judge ─► code

A wrapper does not see other hosts. If a rank fails by a bug, its own wrapper ends with that rank's code, while the
surviving ranks report a lost peer, for which their wrappers end with 75.

A wrapper cannot count a run's failed starts, because its machine may be gone at the next start. Each job that joins has
an attempt number one higher than the job before, and the checkpoint that it restores names the attempt that saved it.
The difference is the number of attempts without a newer checkpoint.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from holdfast.errors import PeerLost
from holdfast.lost_peer import is_lost_connection, is_lost_peer
from operator_side.supervise.job_output import find_exception
from operator_side.supervise.limits import describe_no_progress
from operator_side.supervise.verdict import Cause, Death, Evidence, Verdict, error_class, judge

RETRY_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: the same command may succeed later
_RANKS_MAX = 1 << 30
_SHELL_SIGNALED = 128
# torchrun's summary of failed ranks, and its lines about ranks that it ended itself.
_FAILURE = re.compile(r"^ *rank +: (\d+) .*\n *exitcode +: (-?\d+) \(pid: (\d+)\)", re.MULTILINE)
_CLOSED = re.compile(r"Sending process (\d+) closing signal|Unable to shutdown process (\d+) via")
_ROOT_CAUSE = "Root Cause (first observed failure):"


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """Everything that a wrapper knows when its command has ended."""

    command: str
    host: str
    rank: int  # this rank, if the launcher names it; otherwise 0
    pid: int
    status: int  # its exit code, or minus the number of the signal
    forwarded: frozenset[int] = frozenset()  # signals that this wrapper received and forwarded
    reports: Sequence[dict[str, Any]] = ()
    tail: str = ""  # the end of what the command wrote to stderr
    out_of_memory: bool = False  # the kernel killed a process of this cgroup to free memory


class ExitDecision(NamedTuple):
    """How the command ended, and the wrapper's exit code."""

    code: int
    message: str = ""


@dataclass(slots=True)
class ReportedRank:
    """One process of the job, from its reports. `joined_attempt`: None until it has joined the stager."""

    pid: int
    rank: int
    joined_attempt: int | None = None
    ranks: int = 1
    restored_attempt: int = 0  # the attempt that saved the checkpoint
    staged: bool = False
    noticed: bool = False
    exception: str = ""
    text: str = ""


@dataclass(slots=True)
class _Job:
    """The ranks below this wrapper since torchrun last started them."""

    ranks: dict[int, ReportedRank] = field(default_factory=dict)

    @property
    def joined(self) -> bool:
        return any(rank.joined_attempt is not None for rank in self.ranks.values())

    @property
    def size(self) -> int:
        return max((rank.ranks for rank in self.ranks.values()), default=1)

    @property
    def attempts_without_progress(self) -> int:
        """Attempts in a row without a newer checkpoint, this one included; 0 if this one has saved one."""
        if any(rank.staged for rank in self.ranks.values()):
            return 0
        attempt = max((rank.joined_attempt or 0 for rank in self.ranks.values()), default=0)
        return max(0, attempt - max((rank.restored_attempt for rank in self.ranks.values()), default=0))


def decide_exit_code(outcome: CommandOutcome, *, restarts_max: int) -> ExitDecision:
    """Judge the end of the command. `restarts_max`: how many attempts without a newer checkpoint still end with 75."""
    job = _job(outcome.reports)
    noticed = signal.SIGTERM in outcome.forwarded or any(rank.noticed for rank in job.ranks.values())
    deaths = _deaths(outcome, job)
    if outcome.status == 0 and not noticed:
        return ExitDecision(0, "done")
    if outcome.status == 0:
        # Only the next start can tell whether the script was done or left its loop because of the notice.
        why = f"{outcome.command} ended with 0 after a preemption notice"
        verdict = Verdict(Cause.PREEMPTED, why, "preempted", exit_code=PeerLost.exit_code)
    else:
        verdict = judge(_evidence(outcome, deaths, noticed=noticed))
    if verdict.cause not in {Cause.PREEMPTED, Cause.KILLED, Cause.LOST}:
        code = getattr(error_class(verdict.exception), "exit_code", verdict.exit_code)
        return ExitDecision(code, verdict.message)
    if job.attempts_without_progress > restarts_max:
        why = describe_no_progress(verdict, job.attempts_without_progress)
        return ExitDecision(verdict.exit_code, f"{why}: {verdict.message}")
    # 75 needs a preemption, which others report, or another wrapper's 75, or a job that has joined: a job that never
    # joins must not be restarted forever.
    has_retry = any(death.status == RETRY_EXIT_CODE for death in deaths)
    if verdict.cause is Cause.PREEMPTED or has_retry or job.joined:
        return ExitDecision(RETRY_EXIT_CODE, verdict.message)
    return ExitDecision(verdict.exit_code, f"{verdict.message}, before it had joined the job")


def _evidence(outcome: CommandOutcome, deaths: tuple[Death, ...], *, noticed: bool) -> Evidence:
    return Evidence(
        _RANKS_MAX,  # larger than any rank: every end seen here is a rank's, never the stager's
        0 if deaths else outcome.status,
        {death.rank: outcome.host for death in deaths},
        deaths,
        noticed_hosts=(outcome.host,) if noticed else (),
        stopping=signal.SIGINT in outcome.forwarded,
        launcher=outcome.command,
    )


def _deaths(outcome: CommandOutcome, job: _Job) -> tuple[Death, ...]:
    if outcome.status == 0:
        return ()
    failures = list(_torchrun_failures(outcome.tail))
    if failures:
        return tuple(_death(one, job, outcome) for one in failures)
    status = outcome.status
    if outcome.pid in job.ranks or not job.ranks:
        return (_death(_Failure(outcome.rank, status, outcome.pid), job, outcome),)
    if status < 0:
        return ()  # the launcher itself was killed; the fate of the ranks is unknown
    if status > _SHELL_SIGNALED:
        # Shells, srun and mpirun exit with 128 + N when signal N has killed their process.
        status = _SHELL_SIGNALED - status
    ended = [_Failure(one.rank, max(status, 1), one.pid) for one in job.ranks.values() if one.exception]
    if not ended:
        ended = [_Failure(min(one.rank for one in job.ranks.values()), status, outcome.pid)]
    return tuple(_death(one, job, outcome) for one in ended)


class _Failure(NamedTuple):
    rank: int
    status: int
    pid: int
    ended_by_torchrun: bool = False  # ended by torchrun after another rank had failed


def _torchrun_failures(tail: str) -> Iterator[_Failure]:
    """Yield the ranks in torchrun's failure summary, the first to fail first."""
    others, found, root = tail.rpartition(_ROOT_CAUSE)
    closed = {int(one or other) for one, other in _CLOSED.findall(tail)}
    for text in (root, others) if found else ():
        for rank, status, pid in _FAILURE.findall(text):
            yield _Failure(int(rank), int(status), int(pid), int(pid) in closed and int(status) < 0)


def _death(failure: _Failure, job: _Job, outcome: CommandOutcome) -> Death:
    known = job.ranks.get(failure.pid)
    exception, text = (known.exception, known.text) if known is not None else ("", "")
    if not exception and failure.status > 0 and failure.pid == outcome.pid:
        exception, text = find_exception(outcome.tail.splitlines()), outcome.tail
    # NCCL's watchdog ends a rank whose peer is lost with SIGABRT.
    if failure.status == -signal.SIGABRT and job.size > 1:
        lost_peer = is_lost_connection(outcome.tail)
    else:
        lost_peer = is_lost_peer(exception.rpartition(".")[2], text)
    lost_peer |= failure.status == RETRY_EXIT_CODE
    by_other, is_oom = failure.ended_by_torchrun, outcome.out_of_memory
    return Death(failure.rank, failure.status, exception, by_other, lost_peer, is_oom)


def _job(reports: Sequence[dict[str, Any]]) -> _Job:
    job, newest = _Job(), 0
    for report in reports:
        pid, rank, number = report.get("pid"), report.get("rank"), report.get("round")
        if not (isinstance(pid, int) and isinstance(rank, int) and isinstance(number, int)):
            continue
        if number > newest:  # torchrun has restarted its ranks
            job, newest = _Job(), number
        if number == newest:
            _apply_report(job.ranks.setdefault(pid, ReportedRank(pid, rank)), report)
    return job


def _apply_report(rank: ReportedRank, report: dict[str, Any]) -> None:
    rank.staged |= "staged" in report
    rank.noticed |= "noticed" in report
    match report:
        case {"joined": {"attempt": int(attempt), "ranks": int(ranks)}}:
            rank.joined_attempt, rank.ranks = attempt, ranks
        case {"restored": {"attempt": int(attempt)}}:
            rank.restored_attempt = attempt
        case {"ended": {"exception": str(exception), "text": str(text)}}:
            rank.exception, rank.text = exception, text
