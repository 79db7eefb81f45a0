"""A preemption is told from a bug by what happened, not by the loudest error."""

from __future__ import annotations

import pytest

from operator_side.supervise.verdict import Cause, Death, Evidence, judge

BEGAN = {0: "spot-1", 1: "spot-2", 2: "here"}


def evidence(*deaths: Death, mpirun_status: int = 1, **more: object) -> Evidence:
    return Evidence(2, mpirun_status, BEGAN, deaths, **more)  # type: ignore[arg-type]


GONE = Death(1, -9)
ECHO = Death(0, 1, "RuntimeError")  # what gloo says when its peer is gone
BUG = Death(1, 1, "ValueError")
NOT_DURABLE = Death(1, 11, "holdfast.errors.NotDurable")


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        (evidence(Death(0, 0), Death(1, 0), mpirun_status=0), Cause.DONE),
        (evidence(Death(0, 0), Death(1, 0), Death(2, 9)), Cause.DONE),
        (evidence(mpirun_status=0), Cause.LOST),  # with ULFM mpirun calls it a success that nobody came back
        (evidence(GONE, ECHO), Cause.KILLED),
        (evidence(ECHO, GONE), Cause.KILLED),
        (evidence(Death(1, -15), ECHO), Cause.KILLED),
        (evidence(Death(2, -9)), Cause.KILLED),
        (evidence(BUG, ECHO), Cause.CRASHED),
        (evidence(Death(1, -11)), Cause.CRASHED),
        (evidence(Death(1, -6), ECHO), Cause.CRASHED),
        (evidence(BUG, lost_hosts={"spot-2"}), Cause.PREEMPTED),
        (evidence(ECHO, noticed_hosts={"spot-2"}), Cause.PREEMPTED),
        (evidence(mpirun_status=-9), Cause.KILLED),
        (evidence(Death(0, -15, by_supervisor=True), give_up_reason="rank 1 is silent"), Cause.LOST),
        (evidence(BUG, Death(0, -15, by_supervisor=True), give_up_reason="rank 1 has ended"), Cause.CRASHED),
        (evidence(GONE, give_up_reason="rank 1 has ended"), Cause.KILLED),
        (evidence(GONE, stopping=True), Cause.STOPPED),
        (evidence(Death(0, 0), Death(1, 0), stopping=True), Cause.DONE),
        (Evidence(2, 213), Cause.UNLAUNCHED),
        (evidence(ECHO, lost_first=(1,)), Cause.KILLED),  # the wrapper of rank 1 was killed too
        (evidence(Death(0, 1, "PeerLost"), lost_first=(1,), give_up_reason="rank 0 has ended"), Cause.KILLED),
        (evidence(BUG, ECHO, lost_first=(1,)), Cause.CRASHED),  # it did report, a moment later
        (evidence(BUG, lost_first=(1,), lost_hosts={"spot-2"}), Cause.PREEMPTED),
        (evidence(Death(0, 11), NOT_DURABLE), Cause.LOST),  # one of the ranks says it for all
        (evidence(Death(0, 11)), Cause.CRASHED),  # a script's own code
        (evidence(NOT_DURABLE, Death(2, -9)), Cause.KILLED),
        (evidence(NOT_DURABLE, Death(0, 1, "ValueError")), Cause.CRASHED),
    ],
)
def test_a_verdict_names_the_cause(what: Evidence, cause: Cause) -> None:
    assert judge(what).cause is cause


STARVED = "was killed by the kernel because the memory was used up"


@pytest.mark.parametrize(
    ("deaths", "who"),
    [
        ([Death(1, -9, out_of_memory=True), ECHO], "rank 1 on spot-2"),
        ([ECHO, Death(1, -9, out_of_memory=True)], "rank 1 on spot-2"),
        ([Death(2, -9, out_of_memory=True), ECHO], "the stager on here"),
        ([Death(1, 137, out_of_memory=True)], "rank 1 on spot-2"),  # a shell around the script
        ([Death(0, -15), Death(1, -9, out_of_memory=True)], "rank 1 on spot-2"),  # mpirun ended the other one
    ],
)
def test_a_kill_for_memory_is_named_and_no_preemption(deaths: list[Death], who: str) -> None:
    verdict = judge(evidence(*deaths))
    assert verdict.message == f"{who} {STARVED}"
    assert (verdict.cause, verdict.exit_code) == (Cause.CRASHED, 137)


def test_a_process_of_a_rank_that_was_killed_for_memory_is_named_beside_its_exception() -> None:
    """A worker of a DataLoader, say: the rank itself ends by an exception."""
    verdict = judge(evidence(Death(1, 1, "RuntimeError", out_of_memory=True)))
    assert verdict.message == (
        "rank 1 on spot-2 ended with exit code 1 (RuntimeError); the kernel has killed a process of its control group, "
        "because the memory was used up"
    )
    assert verdict.exit_code == 1


def test_a_process_killed_by_the_supervisor_is_not_blamed_on_memory() -> None:
    verdict = judge(
        evidence(Death(1, -9, by_supervisor=True, out_of_memory=True), give_up_reason="rank 0 is silent")
    )
    assert verdict.cause is Cause.LOST
    assert judge(evidence(Death(1, -15, out_of_memory=True))).cause is Cause.KILLED


def test_a_verdict_says_who_ended_and_how() -> None:
    verdict = judge(evidence(BUG, ECHO))
    assert verdict.message == "rank 1 on spot-2 ended with exit code 1 (ValueError)"
    assert (verdict.rank, verdict.exit_code, verdict.exception) == (1, 1, "ValueError")
    assert judge(evidence(Death(2, -9))).message == "the stager on here was killed by SIGKILL from outside"
    assert judge(evidence(Death(1, -11))).exit_code == 139


def test_the_same_crash_has_the_same_mark() -> None:
    assert judge(evidence(BUG)).signature == judge(evidence(BUG, ECHO)).signature
    assert judge(evidence(BUG)).signature != judge(evidence(Death(1, 1, "KeyError"))).signature
    assert judge(evidence(Death(1, 3))).signature != judge(evidence(Death(1, 4))).signature


def test_a_wrong_setting_is_hopeless() -> None:
    assert judge(evidence(Death(1, 1, "holdfast.errors.ConfigError"))).is_permanent
    assert judge(evidence(Death(2, 2))).is_permanent
    assert not judge(evidence(BUG)).is_permanent
