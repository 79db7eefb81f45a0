"""The exit code of `holdfast rank`, from one wrapper's view: no other host, no stager."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from operator_side.supervise.exit_codes import RETRY_EXIT_CODE, CommandOutcome, ExitDecision, decide_exit_code

TRAINER, LAUNCHER = 41, 40
GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:31337"
NCCL = "NCCL error: remote process exited or there was a network error, NCCL version 2.27.5"


def said(kind: str, pid: int = TRAINER, *, rank: int = 1, start: int = 0, **fields: Any) -> dict[str, Any]:
    return {"pid": pid, "rank": rank, "round": start, kind: fields}


def joined(attempt: int = 5, *, pid: int = TRAINER, rank: int = 1, start: int = 0) -> dict[str, Any]:
    return said("joined", pid, rank=rank, start=start, attempt=attempt, ranks=2)


def ended(exception: str, text: str = "", pid: int = TRAINER, rank: int = 1) -> dict[str, Any]:
    return said("ended", pid, rank=rank, exception=exception, text=text)


def end(
    status: int, *reports: dict[str, Any], pid: int = TRAINER, restarts_max: int = 8, **more: Any
) -> ExitDecision:
    seen = CommandOutcome("python", "spot-1", 1, pid, status, reports=reports, **more)
    return decide_exit_code(seen, restarts_max=restarts_max)


SIGTERM = frozenset({signal.SIGTERM})
TOLD = {"forwarded": SIGTERM}
STARTED = (joined(5), said("restored", attempt=4))  # the attempt before has saved one: nothing was in vain


@pytest.mark.parametrize(
    ("status", "reports", "more", "code"),
    [
        (0, STARTED, {}, 0),
        (0, STARTED, TOLD, RETRY_EXIT_CODE),  # it may have left its loop because of the notice
        (0, (*STARTED, said("noticed")), {}, RETRY_EXIT_CODE),
        (-15, (), TOLD, RETRY_EXIT_CODE),  # before it had joined, too
        (1, (*STARTED, ended("ValueError")), {}, 1),
        (1, (*STARTED, ended("ValueError")), TOLD, RETRY_EXIT_CODE),
        (3, STARTED, {}, 3),
        (-9, STARTED, {}, RETRY_EXIT_CODE),
        (-9, STARTED, {"out_of_memory": True}, 137),
        (-9, (), {}, 137),
        (-15, STARTED, {}, RETRY_EXIT_CODE),
        (-11, STARTED, {}, 139),
        (-6, STARTED, {}, 134),
        (-6, STARTED, {"tail": f"[rank1] watchdog: {NCCL}"}, RETRY_EXIT_CODE),
        (9, (*STARTED, ended("holdfast.errors.PeerLost")), {}, RETRY_EXIT_CODE),
        (9, (ended("holdfast.errors.PeerLost"),), {}, 9),  # the stager never came
        (11, (*STARTED, ended("holdfast.errors.NotDurable")), {}, RETRY_EXIT_CODE),
        (
            11,
            (joined(20), said("restored", attempt=4), ended("holdfast.errors.NotDurable")),
            {},
            11,
        ),  # in vain
        (11, STARTED, {}, 11),  # the script's own
        (2, (ended("holdfast.errors.ConfigError"),), {}, 2),
        (3, (*STARTED, ended("holdfast.errors.StateError")), {}, 3),
        (12, (*STARTED, ended("holdfast.errors.ResumeDiffers")), {}, 12),
        (1, (*STARTED, ended("RuntimeError", GLOO)), {}, RETRY_EXIT_CODE),
        (1, (*STARTED, ended("torch.distributed.DistBackendError", NCCL)), {}, RETRY_EXIT_CODE),
        (1, (*STARTED, ended("RuntimeError", "shapes differ")), {}, 1),
        (1, (*STARTED, ended("ConnectionError", GLOO)), {}, 1),  # the script's own, to whomever
        (-2, STARTED, {"forwarded": frozenset({signal.SIGINT})}, 130),
        (RETRY_EXIT_CODE, (), {}, RETRY_EXIT_CODE),  # another wrapper below this one has judged
        (1, (), {"tail": "Traceback (most recent call last):\n  File x\nKeyError: 3\n"}, 1),
    ],
)
def test_codes_of_a_rank(
    status: int, reports: tuple[dict[str, Any], ...], more: dict[str, Any], code: int
) -> None:
    assert end(status, *reports, **more).code == code


def test_the_cause_of_a_ranks_end_is_said() -> None:
    assert end(-9, *STARTED).message == "rank 1 on spot-1 was killed by SIGKILL from outside"
    assert "before it had joined the job" in end(-9).message
    assert "lost another process of the job (holdfast.errors.PeerLost)" in (
        end(9, *STARTED, ended("holdfast.errors.PeerLost")).message
    )


# -- jobs that are started again and again


@pytest.mark.parametrize("status", [-9, 9])
def test_too_many_fruitless_starts_are_no_preemption(status: int) -> None:
    lost = ended("holdfast.errors.PeerLost") if status == 9 else joined(12)
    for attempt, code in ((11, RETRY_EXIT_CODE), (12, RETRY_EXIT_CODE), (13, 137 if status == -9 else 9)):
        found = end(
            status, joined(attempt), said("restored", attempt=4), lost if status == 9 else joined(attempt)
        )
        assert found.code == code, attempt
    assert found.message.startswith("9 attempts in a row without a newer checkpoint")


def test_a_run_without_any_checkpoint_counts_from_its_first_attempt() -> None:
    assert end(-9, joined(2), restarts_max=2).code == RETRY_EXIT_CODE
    assert end(-9, joined(3), restarts_max=2).code == 137


def test_a_newer_checkpoint_begins_the_count_anew() -> None:
    assert end(-9, joined(90), said("restored", attempt=4), said("staged")).code == RETRY_EXIT_CODE


def test_notices_are_counted_as_well_where_the_job_had_joined() -> None:
    assert end(0, joined(20), said("restored", attempt=4), forwarded=SIGTERM).code == 9
    assert end(-15, forwarded=SIGTERM).code == RETRY_EXIT_CODE


# -- around torchrun


def failed(*failures: tuple[int, int, int], closed: tuple[int, ...] = ()) -> dict[str, Any]:
    """The end of torchrun's stderr; the first failure is the root cause."""
    lines = [f"W1125 torch/api.py:1028] Sending process {pid} closing signal SIGTERM" for pid in closed]
    for number, (rank, status, pid) in enumerate([*failures[1:], failures[0]]):
        last = number == len(failures) - 1
        lines += ["Root Cause (first observed failure):"] if last else []
        lines += [
            f"[{number}]:",
            f"  rank      : {rank} (local_rank: {rank})",
            f"  exitcode  : {status} (pid: {pid}) ",
        ]
    return {"tail": "\n".join(lines), "pid": LAUNCHER}


BOTH = (joined(5), joined(5, pid=42, rank=0), said("restored", attempt=4))
KILLED = (1, -9, TRAINER)
BY_AGENT = (0, -15, 42)


@pytest.mark.parametrize(
    ("reports", "failures", "closed", "code"),
    [
        (BOTH, (KILLED, BY_AGENT), (42,), RETRY_EXIT_CODE),
        (BOTH, ((1, -11, TRAINER), BY_AGENT), (42,), 139),
        (BOTH, ((1, 3, TRAINER), BY_AGENT), (42,), 3),
        (BOTH, ((1, 3, TRAINER), (0, -9, 42)), (42,), 3),  # thirty seconds later
        ((*BOTH, ended("ValueError")), ((1, 1, TRAINER), BY_AGENT), (42,), 1),
        # The survivor's error was seen first.
        ((*BOTH, ended("RuntimeError", GLOO, 42, 0)), ((0, 1, 42), KILLED), (), RETRY_EXIT_CODE),
        ((*BOTH, ended("RuntimeError", GLOO, 42, 0)), ((0, 1, 42), BY_AGENT), (), RETRY_EXIT_CODE),
        # A rank with a bug is the cause, whoever is seen first.
        (
            (*BOTH, ended("RuntimeError", GLOO, 42, 0), ended("ValueError")),
            ((0, 1, 42), (1, 1, TRAINER)),
            (),
            1,
        ),
        ((ended("holdfast.errors.ConfigError"),), ((1, 2, TRAINER),), (), 2),
        (BOTH, ((1, RETRY_EXIT_CODE, 99),), (), RETRY_EXIT_CODE),
        ((), ((1, RETRY_EXIT_CODE, 99), (0, 3, 98)), (), 3),  # wrappers below this one: a survivor, and a bug
        ((), (KILLED,), (), 137),
    ],
)
def test_codes_of_torchrun(
    reports: tuple[dict[str, Any], ...],
    failures: tuple[tuple[int, int, int], ...],
    closed: tuple[int, ...],
    code: int,
) -> None:
    assert end(1, *reports, **failed(*failures, closed=closed)).code == code


def test_torchrun_itself_may_be_killed() -> None:
    found = end(-9, *BOTH, pid=LAUNCHER)
    assert found == ExitDecision(RETRY_EXIT_CODE, "python was killed by SIGKILL")


def test_only_the_ranks_of_the_last_start_by_torchrun_count() -> None:
    again = joined(6, start=1, pid=43)
    assert end(1, *BOTH, ended("ValueError"), again, **failed((1, -9, 43))).code == RETRY_EXIT_CODE
    before = said("restored", 44, start=2, attempt=4)  # it has not joined since
    assert end(1, *BOTH, again, before, **failed((1, -9, 44))).code == 137


def test_another_launcher_is_believed_as_a_shell_is() -> None:
    assert end(137, *BOTH, pid=LAUNCHER).code == RETRY_EXIT_CODE
    assert end(139, *BOTH, pid=LAUNCHER).code == 139
    assert end(2, *BOTH, ended("holdfast.errors.ConfigError"), pid=LAUNCHER).code == 2
    assert end(1, *BOTH, ended("RuntimeError", GLOO), pid=LAUNCHER).code == RETRY_EXIT_CODE
    assert end(4, *BOTH, pid=LAUNCHER).code == 4


@pytest.mark.parametrize(
    "line", [{}, {"pid": "1", "rank": 0, "round": 0}, {"pid": 41, "rank": 1, "round": 0, "joined": 3}]
)
def test_a_report_that_is_none_is_passed_over(line: dict[str, Any]) -> None:
    assert end(-9, line).code == 137
