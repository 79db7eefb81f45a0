"""The state machine: stories event by event, and random orders of events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.image.shares import ShareNumber
from operator_side.commands.run import _pause_seconds
from operator_side.supervise.core import Core, SupervisorPhase
from operator_side.supervise.hosts import Host
from operator_side.supervise.limits import Limits
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
    StepDurable,
    StepStaged,
    Stop,
    Terminate,
)
from operator_side.supervise.verdict import Cause


class Story:
    """A core, and all it has asked for. Pauses are as many seconds as relaunches in a row, if nothing else is said."""

    def __init__(
        self, ranks: int = 2, ranks_min: int = 2, *, pause: Callable[[int], float] = float, **limits: Any
    ) -> None:
        self.core = Core(Limits(ranks, ranks_min, **limits), pause)
        self.now = 0.0
        self.hosts: tuple[Host, ...] | None = None
        self.asked: list[Action] = self.core.begin()

    def tell(self, *events: Event, seconds: float = 0.0) -> Story:
        self.now += seconds
        for event in events:
            self.asked += self.core.handle(event, self.now)
        return self

    def of(self, kind: type[Action]) -> list[Any]:
        return [action for action in self.asked if isinstance(action, kind)]

    def launch(self) -> Story:
        self.tell(HostsSeen(self.hosts), seconds=1)
        assert self.core.phase is SupervisorPhase.RUNNING, self.asked
        for rank in range(self.of(Launch)[-1].ranks + 1):
            self.tell(ProcessStarted(rank, f"h{rank}"))
        return self

    def end(self, *deaths: ProcessExited, status: int = 1) -> Story:
        return self.tell(*deaths, MpirunExited(status), HostsSeen(self.hosts))

    def wait(self) -> Story:
        """Until it wants to start again."""
        for _ in range(100):
            self.tell(ClockTick(), seconds=1)
            if self.core.phase is not SupervisorPhase.PAUSING:
                break
        return self

    @property
    def phase(self) -> SupervisorPhase:
        return self.core.phase

    @property
    def verdict(self) -> Any:
        (finish,) = self.of(Finish)
        return finish.verdict


KILLED, BUG = ProcessExited(0, -9), ProcessExited(1, 1, "ValueError")


def test_a_rank_that_dies_with_its_wrapper_is_no_bug_however_often() -> None:
    """Only the stager tells of it; what the survivor reports is an echo."""
    story = Story()
    for _ in range(3):
        story.launch().tell(ProcessStarted(0, "a"), ProcessStarted(1, "b"), AllJoined(), StepStaged(4))
        story.tell(RankDead(1), ProcessExited(0, 1, "RuntimeError"), MpirunExited(1)).tell(HostsSeen(None))
        assert story.core.phase is SupervisorPhase.PAUSING, story.asked[-3:]
        story.tell(ClockTick(), seconds=60)
    assert [note.fields["cause"] for note in story.of(Note) if note.event == "ended"] == [Cause.KILLED] * 3


def test_a_rank_that_died_unreported_ends_the_attempt_when_nobody_else_notices() -> None:
    story = Story(lost_seconds_max=30.0).launch()
    story.tell(ProcessStarted(0, "a"), ProcessStarted(1, "b"), AllJoined(), RankDead(1)).tell(
        ClockTick(), seconds=29
    )
    assert not story.of(Terminate)
    story.tell(ClockTick(), seconds=2)
    assert story.of(Terminate)


def test_three_launches_that_start_no_process_are_the_end() -> None:
    """mpirun refuses an option each time."""
    story = Story()
    for _ in range(3):
        story.tell(HostsSeen(None), seconds=1).end(status=213).wait()
    assert len(story.of(Launch)) == 3
    assert story.verdict.cause is Cause.UNLAUNCHED
    assert "no process began 3 times in a row" in story.verdict.message


def test_launches_that_fail_in_different_ways_are_tried_again() -> None:
    story = Story()
    for status in (213, 1, 213, 213):
        story.tell(HostsSeen(None), seconds=1).end(status=status).wait()
    assert not story.of(Finish)


def test_killed_then_done() -> None:
    story = Story().launch().tell(StepStaged(5)).end(KILLED)
    assert story.phase is SupervisorPhase.PAUSING, "step 5 is staged only, and the ring has it"
    story.wait().launch().end(ProcessExited(0, 0), ProcessExited(1, 0), ProcessExited(2, 0), status=0)
    assert story.verdict.cause is Cause.DONE
    assert [launch.attempt for launch in story.of(Launch)] == [1, 2]


def test_the_same_crash_twice_without_progress_is_the_end() -> None:
    story = Story().launch().tell(StepStaged(5), StepDurable(5)).end(BUG).wait().launch().end(BUG)
    assert story.verdict.cause is Cause.CRASHED
    assert story.verdict.rank == 1
    assert "the same crash 2 times in a row" in story.verdict.message


def test_a_step_counts_once_every_share_of_it_is_staged() -> None:
    story = Story(stagers=2).launch()
    story.tell(StepStaged(5, ShareNumber(0, 2)), StepStaged(5, ShareNumber(0, 2)))
    assert story.core.newest_step == -1
    story.tell(StepStaged(5, ShareNumber(1, 2)))
    assert story.core.newest_step == 5
    story.tell(StepStaged(9, ShareNumber(0, 1)))  # the image has one part, and so one share
    assert story.core.newest_step == 9


def test_all_stagers_say_that_the_processes_have_met() -> None:
    story = Story(stagers=2).launch().tell(AllJoined())
    assert not [note for note in story.of(Note) if note.event == "joined"]
    story.tell(AllJoined())
    assert [note.event for note in story.of(Note)][-1] == "joined"


def test_a_stager_that_ends_before_the_others_ends_no_attempt() -> None:
    story = Story(stagers=2, lost_seconds_max=30).launch().tell(AllJoined(), AllJoined(), ProcessExited(3, 0))
    story.tell(ClockTick(), seconds=60)
    assert not story.of(Terminate)
    story.tell(ProcessExited(2, 0)).tell(ClockTick(), seconds=31)
    assert story.of(Terminate)


def test_a_stager_of_several_that_was_killed_is_named() -> None:
    story = (
        Story(stagers=2, lost_seconds_max=30).launch().tell(AllJoined(), AllJoined(), ProcessExited(3, -9))
    )
    story.tell(ClockTick(), seconds=31)
    assert story.of(Terminate)
    assert any("stager 2/2 has ended" in note.message for note in story.of(Note))


def test_progress_makes_it_another_matter() -> None:
    story = Story()
    for step in range(10):
        story.launch().tell(StepStaged(step), StepDurable(step)).end(BUG).wait()
    assert not story.of(Finish)


def test_an_older_step_again_is_no_progress() -> None:
    """A script that never restores does the same steps again and again."""
    story = Story().launch().tell(StepStaged(5), StepDurable(5)).end(BUG).wait()
    story.launch().tell(StepStaged(3), StepDurable(3), StepStaged(5), StepDurable(5)).end(BUG)
    assert story.verdict.cause is Cause.CRASHED


def test_different_crashes_are_counted_together_only() -> None:
    story = Story(restarts_max=4)
    for number in range(4):
        story.launch().end(ProcessExited(1, 1, f"Error{number}")).wait()
    assert not story.of(Finish)
    story.launch().end(ProcessExited(1, 1, "Error9"))
    assert "5 attempts in a row" in story.verdict.message


def test_kills_without_progress_end_too_and_name_the_likely_cause() -> None:
    story = Story(restarts_max=3)
    for _ in range(3):
        story.launch().end(KILLED).wait()
    story.launch().end(KILLED)
    assert "out-of-memory" in story.verdict.message


def test_a_crash_after_a_kill_is_the_first_one() -> None:
    story = Story().launch().end(BUG).wait().launch().end(KILLED).wait().launch().end(BUG)
    assert not story.of(Finish)
    story.wait().launch().end(BUG)
    assert story.verdict.cause is Cause.CRASHED


def test_a_wrong_setting_is_not_tried_twice() -> None:
    assert Story().launch().end(ProcessExited(2, 2)).verdict.exit_code == 2


def test_a_rank_that_lost_a_peer_is_ended_after_a_while() -> None:
    story = Story(lost_seconds_max=30, kill_seconds=5).launch().tell(AllJoined(), KILLED)
    story.tell(ClockTick(), seconds=29)
    assert not story.of(Terminate)
    story.tell(ClockTick(), seconds=1)
    assert story.of(Terminate) == [Terminate(gently=False)]
    story.tell(ClockTick(), seconds=5)
    assert story.of(KillAttempt) == [KillAttempt()]
    story.end(status=-9)
    assert "killed by SIGKILL" in story.of(Note)[-2].message


def test_a_kill_before_all_have_met_ends_the_others_at_once() -> None:
    """They wait for it in MPI, and would for as long as they are let."""
    story = Story(lost_seconds_max=30, kill_seconds=5).launch().tell(KILLED, ClockTick())
    assert story.of(Terminate) == [Terminate(gently=False)]
    story.end(status=-9)
    assert "killed by SIGKILL" in story.of(Note)[-2].message


def test_after_progress_the_fleet_is_looked_at_again_without_a_pause() -> None:
    story = Story(pause=_pause_seconds).launch().tell(AllJoined(), StepStaged(5)).end(KILLED)
    assert story.phase is SupervisorPhase.FINDING
    assert [note.fields["pause_seconds"] for note in story.of(Note) if note.event == "relaunching"] == [0.0]
    story.tell(HostsSeen(None))
    assert [launch.attempt for launch in story.of(Launch)] == [1, 2], "no time has passed since the end"


def test_an_attempt_without_progress_is_followed_by_a_pause() -> None:
    story = Story(pause=_pause_seconds).launch().end(KILLED).launch().end(KILLED)
    assert story.phase is SupervisorPhase.PAUSING
    pauses = [note.fields["pause_seconds"] for note in story.of(Note) if note.event == "relaunching"]
    assert pauses[0] == 0.0
    assert 0 < pauses[1] <= 2.0


def test_a_rank_that_left_the_stager_after_a_kill_is_ended_at_once() -> None:
    """There is nothing more to save, so what its process still does is not waited for."""
    story = Story(lost_seconds_max=30).launch().tell(AllJoined(), KILLED, ClockTick())
    assert not story.of(Terminate), "the stager may still receive"
    story.tell(ProcessExited(2, 0), ClockTick())
    assert story.of(Terminate) == [Terminate(gently=False)]
    story.end(ProcessExited(1, -15), status=-15)
    assert "rank 0 on h0 was killed by SIGKILL" in story.of(Note)[-2].message


@pytest.mark.parametrize("first", [[BUG], [ProcessExited(0, 1), RankDead(1)], [ProcessExited(1, 0)]])
def test_without_a_kill_the_others_may_say_why_though_the_stager_has_ended(first: list[Event]) -> None:
    story = Story(lost_seconds_max=30).launch().tell(AllJoined(), *first, ProcessExited(2, 0), ClockTick())
    assert not story.of(Terminate)


def test_a_stager_that_failed_does_not_end_the_others_at_once() -> None:
    story = Story(lost_seconds_max=30).launch().tell(AllJoined(), KILLED, ProcessExited(2, 1), ClockTick())
    assert not story.of(Terminate)


def test_a_crash_before_all_have_met_lets_the_others_say_why() -> None:
    story = Story(lost_seconds_max=30).launch().tell(ProcessExited(0, 1), ClockTick())
    assert not story.of(Terminate)
    story.tell(ClockTick(), seconds=30)
    assert story.of(Terminate)


def test_a_rank_that_ends_well_before_the_others_is_no_loss() -> None:
    story = Story(lost_seconds_max=30).launch().tell(ProcessExited(0, 0)).tell(ClockTick(), seconds=1000)
    assert not story.of(Terminate)


def test_silence_ends_it_unless_it_is_over_in_time() -> None:
    story = (
        Story(silent_seconds_max=30)
        .launch()
        .tell(RankSilence(1))
        .tell(RankSilence(1, is_over=True), seconds=29)
    )
    story.tell(ClockTick(), seconds=100)
    assert not story.of(Terminate)
    story.tell(RankSilence(1)).tell(ClockTick(), seconds=30)
    assert story.of(Terminate)
    story.end(status=-9)
    assert "rank 1 on h1 gives no sign of life" in story.of(Note)[-2].message


def test_a_process_that_the_supervisor_ends_was_not_killed_from_outside() -> None:
    story = Story(silent_seconds_max=30).launch().tell(RankSilence(1)).tell(ClockTick(), seconds=30)
    story.end(ProcessExited(0, -15), ProcessExited(2, -9), status=-15)
    assert [note.fields["cause"] for note in story.of(Note) if note.event == "ended"] == ["lost"]


def test_no_newer_step_for_too_long_ends_it() -> None:
    story = (
        Story(stall_seconds_max=100).launch().tell(StepStaged(1), seconds=90).tell(ClockTick(), seconds=90)
    )
    assert not story.of(Terminate)
    story.tell(ClockTick(), seconds=10)
    assert story.of(Terminate)


def hosts(*names: str, slots: int = 1) -> tuple[Host, ...]:
    return tuple(Host(name, slots) for name in names)


def test_a_host_that_is_gone_ends_the_attempt_and_the_rest_goes_on() -> None:
    story = Story(3, 2)
    story.hosts = hosts("a", "b", "c")
    story.launch().tell(HostsSeen(hosts("a", "c")), HostsSeen(hosts("a", "c")))
    assert story.of(Terminate) == [Terminate(gently=False)]
    story.hosts = hosts("a", "c")
    story.end(status=-15).wait().launch()
    assert story.of(Launch)[-1].hosts == hosts("a", "c")
    assert story.of(Launch)[-1].ranks == 2
    assert any(note.fields.get("cause") == "preempted" for note in story.of(Note))


def test_a_single_look_that_misses_a_host_ends_nothing() -> None:
    """An ssh that fails once is tried again at once; from then on it counts from the beginning."""
    story = Story(3, 2)
    story.hosts = hosts("a", "b", "c")
    story.launch()
    for _ in range(3):
        looks = len(story.of(PollFleet))
        story.tell(HostsSeen(hosts("a", "c")))
        assert len(story.of(PollFleet)) == looks + 1
        story.tell(HostsSeen(hosts("a", "b", "c")))
    assert not story.of(Terminate)
    # Another host each time: none of them was missing twice.
    story.tell(HostsSeen(hosts("a", "c")), HostsSeen(hosts("a", "b")))
    assert not story.of(Terminate)
    story.tell(HostsSeen(hosts("a", "b")))
    assert story.of(Terminate)
    assert "host c is gone" in story.of(Note)[-1].message


def test_a_verdict_waits_for_the_second_look_but_not_for_ever() -> None:
    story = Story(3, 2, fleet_seconds_max=30)
    story.hosts = hosts("a", "b", "c")
    story.launch().tell(BUG, MpirunExited(1), HostsSeen(hosts("a", "c")))
    assert story.phase is SupervisorPhase.JUDGING
    story.tell(HostsSeen(hosts("a", "c")))
    assert _told(story, "ended")[-1]["cause"] == "preempted"
    story = Story(3, 2, fleet_seconds_max=30)
    story.hosts = hosts("a", "b", "c")
    story.launch().tell(BUG, MpirunExited(1), HostsSeen(hosts("a", "c"))).tell(ClockTick(), seconds=30)
    assert _told(story, "ended")[-1]["cause"] == "crashed", "one look is no evidence"


@pytest.mark.parametrize("why", ["gone", "silent"])
def test_an_mpirun_that_waits_only_for_lost_hosts_is_killed_at_once(why: str) -> None:
    """mpirun waits for the daemon of a host that will not answer, and hands on nothing more of any other."""
    story = Story(3, 2, kill_seconds=5, silent_seconds_max=0)
    story.hosts = hosts("h0", "h1", "h2")
    story.launch()
    gone = HostsSeen(hosts("h0", "h2"))
    story.tell(*((gone, gone) if why == "gone" else (RankSilence(1), ClockTick())))
    assert story.of(Terminate) == [Terminate(gently=False)]
    story.tell(ProcessExited(0, -15), ClockTick())
    assert not story.of(KillAttempt), "the stager has not ended yet"
    story.tell(ProcessExited(3, -15), ClockTick(), ClockTick())
    assert len(story.of(KillAttempt)) == 1
    story.tell(ClockTick(), seconds=5)
    assert len(story.of(KillAttempt)) == 2
    looks = len(story.of(PollFleet))
    story.tell(MpirunExited(-9))
    if why == "gone":
        assert story.phase is SupervisorPhase.PAUSING, (
            "that it is gone decides it: no further look waits for it"
        )
    else:
        assert len(story.of(PollFleet)) == looks + 1


def test_mpirun_that_can_still_end_by_itself_is_given_its_time() -> None:
    story = Story(lost_seconds_max=1, kill_seconds=5).launch().tell(KILLED).tell(ClockTick(), seconds=1)
    story.tell(ProcessExited(1, -15), ProcessExited(2, -15), ClockTick())
    assert not story.of(KillAttempt)
    story.tell(ClockTick(), seconds=5)
    assert story.of(KillAttempt)


def test_too_few_hosts_are_waited_for_and_asked_for() -> None:
    story = Story(3, 2, hosts_seconds_max=600)
    story.tell(HostsSeen(hosts("a"))).tell(HostsSeen(hosts("a")), seconds=15)
    assert story.of(Launch) == []
    assert story.of(PollFleet) == [PollFleet(), PollFleet(2)]
    story.tell(HostsSeen(hosts("a", "b")), seconds=15)
    assert story.of(Launch)[0].ranks == 2


def test_hosts_that_never_come_end_it() -> None:
    story = Story(3, 2, hosts_seconds_max=600).tell(HostsSeen(())).tell(ClockTick(), seconds=600)
    assert story.verdict.exit_code == 9


def test_a_notice_makes_a_crash_a_preemption() -> None:
    story = Story().launch().tell(RankNoticed(1)).end(BUG).wait().launch().tell(RankNoticed(1)).end(BUG)
    causes = [note.fields["cause"] for note in story.of(Note) if note.event == "ended"]
    assert causes == ["preempted", "preempted"]
    assert not story.of(Finish)


def test_a_hosts_notice_is_known_by_its_ranks() -> None:
    story = Story().launch().tell(RankNoticed(1)).end(BUG)
    (note,) = [note for note in story.of(Note) if note.event == "ended"]
    assert "host h1 had a notice" in note.message


def test_the_way_back_to_training_is_told_phase_by_phase() -> None:
    story = Story(kill_seconds=5).launch()
    story.tell(AllJoined(), seconds=1).tell(RankRestored(0, -1), RankRestored(1, -1), seconds=2)
    story.tell(RankStepped(0, 0), RankStepped(0, 1), seconds=4)
    assert not _told(story, "training"), "one rank alone does not train"
    story.tell(RankStepped(1, 0))
    assert _told(story, "training")[-1] == {
        "attempt": 1,
        "step": 0,
        "joined_seconds": 1.0,
        "restored_seconds": 2.0,
        "training_seconds": 4.0,
        "seconds": 7.0,
    }
    story.tell(KILLED).tell(MpirunExited(1), seconds=8).tell(HostsSeen(None)).wait()
    assert _told(story, "lost") == [{"attempt": 1, "rank": 0, "status": -9}]
    # A second loss on the way belongs to the first, and what it had reached is void.
    story.launch().tell(AllJoined(), seconds=16).tell(
        ProcessExited(1, -9), MpirunExited(1), HostsSeen(None), seconds=32
    ).wait()
    assert len(_told(story, "lost")) == 2
    story.launch().tell(RankRestored(0, 3), RankRestored(1, 3), seconds=64).tell(
        RankStepped(0, 4), RankStepped(1, 4)
    )
    assert _told(story, "restored")[-1] == {"attempt": 3, "step": 3}
    told = _told(story, "training")[-1]
    assert set(told) >= {"ended_seconds", "launched_seconds", "restored_seconds", "training_seconds"}
    assert "joined_seconds" not in told
    parts = [value for name, value in told.items() if name.endswith("_seconds")]
    assert sum(parts) == told["seconds"] > 8 + 16 + 32 + 64


def test_a_silent_rank_is_lost_when_it_is_given_up() -> None:
    story = Story(silent_seconds_max=30).launch().tell(RankSilence(1)).tell(ClockTick(), seconds=30)
    story.end(status=-9).wait().launch().tell(RankStepped(0, 1), RankStepped(1, 1), seconds=7)
    told = _told(story, "training")[-1]
    assert told["seconds"] == told["ended_seconds"] + told["launched_seconds"] + 7


def _told(story: Story, event: str) -> list[dict[str, Any]]:
    return [dict(note.fields) for note in story.of(Note) if note.event == event]


def test_the_verdict_does_not_wait_for_a_fleet_that_is_silent() -> None:
    story = Story(fleet_seconds_max=30).launch().tell(KILLED, MpirunExited(1)).tell(ClockTick(), seconds=29)
    assert story.core.phase is SupervisorPhase.JUDGING
    story.tell(ClockTick(), seconds=1)
    assert story.core.phase is not SupervisorPhase.JUDGING


def test_stop_is_gentle_first() -> None:
    story = Story(grace_seconds=30, kill_seconds=5).launch().tell(Stop("SIGTERM came"))
    assert story.of(Terminate) == [Terminate(gently=True)]
    story.tell(ClockTick(), seconds=30)
    assert story.of(Terminate)[-1] == Terminate(gently=False)
    story.tell(ClockTick(), seconds=5)
    assert story.of(KillAttempt)
    story.end(status=-9)
    assert (story.verdict.cause, story.verdict.exit_code) == (Cause.STOPPED, 130)


def test_stop_twice_is_in_a_hurry() -> None:
    story = Story().launch().tell(Stop("SIGINT came"), Stop("SIGINT came"))
    assert story.of(Terminate) == [Terminate(gently=True), Terminate(gently=False)]


@pytest.mark.parametrize("after", ["begin", "judged"])
def test_stop_between_attempts(after: str) -> None:
    story = Story()
    if after == "judged":
        story.launch().end(KILLED)
    assert story.tell(Stop("SIGTERM came")).verdict.cause is Cause.STOPPED


RANK, STEP = st.integers(0, 3), st.integers(0, 30)
ANY = st.one_of(
    st.just(ClockTick()),
    st.builds(
        HostsSeen,
        st.one_of(st.none(), st.sets(st.sampled_from("abc")).map(lambda names: hosts(*sorted(names)))),
    ),
    st.builds(ProcessStarted, RANK, st.sampled_from("abc")),
    st.builds(
        ProcessExited, RANK, st.sampled_from([0, 1, 2, -9, -11, -15]), st.sampled_from(["", "ValueError"])
    ),
    st.builds(StepStaged, STEP),
    st.builds(StepDurable, STEP),
    st.builds(RankSilence, RANK, st.booleans()),
    st.builds(RankNoticed, RANK),
    st.just(AllJoined()),
    st.builds(RankRestored, RANK, STEP),
    st.builds(RankStepped, RANK, STEP),
    st.builds(MpirunExited, st.sampled_from([0, 1, -9])),
    st.builds(Stop, st.just("SIGTERM came")),
)


@settings(max_examples=300)
@given(st.lists(st.tuples(ANY, st.floats(0, 50)), max_size=80))
def test_the_supervisor_ends_once_in_any_order_of_events(events: list[tuple[Event, float]]) -> None:
    """One job at a time, each with enough ranks; never one after the end, one end, and the end is always reached."""
    limits = Limits(3, 2, restarts_max=3)
    core = Core(limits, float)
    now, runs, attempts, over = 0.0, False, 0, 0
    core.begin()
    # In the end nothing but time passes, no host is there, and whatever is asked to die does.
    quiet: list[tuple[Event, float]] = [(HostsSeen(()), 40.0), (ClockTick(), 40.0)] * 120
    for event, seconds in [*events, *quiet]:
        if isinstance(event, MpirunExited) and not runs:
            continue
        now += seconds
        asked = core.handle(event, now)
        if isinstance(event, MpirunExited):
            runs = False
        for action in asked:
            assert not over
            match action:
                case Launch(attempt, ranks, placed):
                    assert not runs
                    assert attempt == attempts + 1
                    assert limits.ranks_min <= ranks <= limits.ranks
                    assert placed is None or sum(host.slots for host in placed) == ranks
                    runs, attempts = True, attempt
                case Terminate() | KillAttempt():
                    assert runs
                case Finish():
                    assert not runs
                    over += 1
        if runs and core.phase is SupervisorPhase.ENDING and seconds == 40.0:
            runs = False
            for action in core.handle(MpirunExited(-9), now):
                assert not isinstance(action, Launch)
                over += isinstance(action, Finish)
    assert over == 1 or core.phase is SupervisorPhase.RUNNING
