"""Which checkpoint is set aside after crashes, how often, and when the run ends nevertheless."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.image.checkpoint_id import CheckpointId
from operator_side.supervise.core import SupervisorPhase
from operator_side.supervise.supervisor_messages import (
    Launch,
    Note,
    ProcessExited,
    RankRestored,
    RetainCheckpoint,
    StepDurable,
    StepStaged,
)
from operator_side.supervise.verdict import Cause
from tests.unit.operator_side.supervise.test_core import BUG, KILLED, Story

OTHER_BUG, PARTNER = ProcessExited(1, 1, "KeyError"), ProcessExited(0, 1, "RuntimeError")
OLD, GOOD, POISONED = CheckpointId(1, 1), CheckpointId(1, 3), CheckpointId(1, 5)


def life(
    story: Story,
    key: CheckpointId | None,
    before: CheckpointId | None,
    *ends: ProcessExited,
    staged: tuple[int, ...] = (),
) -> Story:
    """An attempt that is restored from `key`, stages some steps, and ends so."""
    if story.phase is SupervisorPhase.PAUSING:
        story.wait()
    story.launch()
    for rank in range(2):
        told = (-1, 0, None) if key is None else (key.step, key.attempt, before)
        story.tell(RankRestored(rank, *told))
    return story.tell(*(StepStaged(step) for step in staged)).end(*(ends or (BUG,)))


def begun(**limits: Any) -> Story:
    """The first attempt has saved all there is, and then crashed."""
    return life(Story(**limits), None, None, staged=(1, 3, 5))


def notes(story: Story) -> list[dict[str, Any]]:
    return [dict(note.fields) for note in story.of(Note) if note.event == "set_aside"]


def passed_over(story: Story) -> tuple[CheckpointId, ...]:
    if story.phase is SupervisorPhase.PAUSING:
        story.wait()
    story.launch()
    launch: Launch = story.of(Launch)[-1]
    return launch.set_aside


def test_two_equal_crashes_after_the_restore_of_one_checkpoint_set_it_aside() -> None:
    story = life(begun(), POISONED, GOOD)
    assert not notes(story), "the crash of the attempt that saved it came after no restore"
    life(story, POISONED, GOOD)
    assert notes(story) == [
        {"attempt": 3, "step": 5, "of_attempt": 1, "before_step": 3, "before_attempt": 1, "crashes": 2}
    ]
    (note,) = [note for note in story.of(Note) if note.event == "set_aside"]
    assert note.is_warning
    assert note.message == (
        "step 5 (attempt 1) is set aside: 2 attempts that were restored from it crashed the same way (rank 1 on h1 "
        "ended with exit code 1 (ValueError)); the next attempt goes back to step 3 (attempt 1)"
    )
    assert story.of(RetainCheckpoint) == [RetainCheckpoint(POISONED)]
    assert [launch.set_aside for launch in story.of(Launch)] == [(), (), ()]
    assert passed_over(story) == (POISONED,)


def test_the_status_file_tells_which_attempt_had_saved_what_is_restored() -> None:
    story = life(begun(), CheckpointId(4, 3), OLD)
    told = [dict(note.fields) for note in story.of(Note) if note.event == "restored"]
    assert told == [{"attempt": 1, "step": -1}, {"attempt": 2, "step": 3, "of_attempt": 4}]


def test_the_job_that_goes_on_from_the_one_before_ends_well() -> None:
    story = life(life(begun(), POISONED, GOOD), POISONED, GOOD)
    life(story, GOOD, OLD, ProcessExited(0, 0), ProcessExited(1, 0), ProcessExited(2, 0), staged=(5, 7))
    assert story.verdict.cause is Cause.DONE


def test_two_in_a_row_are_set_aside_and_then_the_run_ends_as_ever() -> None:
    story = life(life(begun(), POISONED, GOOD), POISONED, GOOD)
    life(life(story, GOOD, OLD), GOOD, OLD)
    assert [(one["step"], one["before_step"]) for one in notes(story)] == [(5, 3), (3, 1)]
    life(story, OLD, CheckpointId(1, 0))
    assert story.verdict.cause is Cause.CRASHED
    assert story.verdict.message.startswith(
        "the same crash 6 times in a row without a newer checkpoint: a bug"
    )
    assert story.verdict.message.endswith(
        "; set aside before, which did not help: step 5 (attempt 1), step 3 (attempt 1)"
    )
    assert [launch.set_aside for launch in story.of(Launch)][-1] == (POISONED, GOOD)


@pytest.mark.parametrize("set_aside_max", [0, 1, 3])
def test_set_aside_max_bounds_how_many_are_set_aside(set_aside_max: int) -> None:
    story = begun(set_aside_max=set_aside_max, restarts_max=100)
    while story.phase is not SupervisorPhase.OVER:
        step = 100 - len(notes(story))
        life(story, CheckpointId(1, step), CheckpointId(1, step - 1))
    assert len(notes(story)) == set_aside_max
    assert len(story.of(Launch)) == 2 + 2 * set_aside_max


def test_without_an_older_one_the_run_ends_as_ever() -> None:
    story = life(begun(), POISONED, None)
    assert "the same crash 2 times in a row" in story.verdict.message
    assert "set aside" not in story.verdict.message


def test_crashes_max_1_ends_the_run_at_the_first_crash() -> None:
    story = Story(crashes_max=1)
    life(story, POISONED, GOOD)
    assert "the same crash 1 times in a row" in story.verdict.message


def test_more_crashes_are_waited_for_where_more_are_asked_for() -> None:
    story = begun(crashes_max=3)
    for _ in range(3):
        assert not notes(story)
        life(story, POISONED, GOOD)
    assert [one["crashes"] for one in notes(story)] == [3]


def test_memory_that_is_used_up_says_nothing_about_a_checkpoint() -> None:
    story = begun()
    for _ in range(2):
        life(story, POISONED, GOOD, ProcessExited(1, -9, out_of_memory=True))
    assert not notes(story)
    assert "the same crash 2 times in a row" in story.verdict.message
    assert "rank 1 on h1 was killed by the kernel because the memory was used up" in story.verdict.message
    assert story.verdict.exit_code == 137


@pytest.mark.parametrize("end", [(KILLED,), (ProcessExited(0, -9), PARTNER)])
def test_a_preemption_never_counts_and_hides_nothing(end: tuple[ProcessExited, ...]) -> None:
    story = begun()
    for _ in range(3):
        life(story, POISONED, GOOD, *end)
    assert not notes(story)
    life(story, POISONED, GOOD)
    assert not notes(story), "this is the first"
    life(life(story, POISONED, GOOD, *end), POISONED, GOOD)
    assert [one["step"] for one in notes(story)] == [5]


def test_another_crash_begins_anew() -> None:
    story = life(begun(), POISONED, GOOD)
    life(story, POISONED, GOOD, OTHER_BUG)
    assert not notes(story)
    life(story, POISONED, GOOD, OTHER_BUG)
    assert [one["crashes"] for one in notes(story)] == [2]


def test_a_crash_before_every_rank_has_its_state_back_does_not_count() -> None:
    story = life(begun(), POISONED, GOOD)
    story.wait().launch().tell(RankRestored(0, 5, 1, GOOD)).end(BUG)
    assert not notes(story)
    assert story.verdict.cause is Cause.CRASHED


def test_a_newer_checkpoint_in_between_begins_anew() -> None:
    """Even of a step that was there before: the next attempt begins with it."""
    story = life(life(begun(restarts_max=100), POISONED, GOOD), POISONED, GOOD, staged=(5,))
    assert not notes(story)
    assert story.verdict.cause is Cause.CRASHED, "and nothing speaks against the checkpoint"
    story = life(begun(), POISONED, GOOD)
    life(story, POISONED, GOOD, staged=(6,))
    life(story, CheckpointId(3, 6), POISONED)
    assert not notes(story)
    life(story, CheckpointId(3, 6), POISONED)
    assert [(one["step"], one["of_attempt"], one["before_step"]) for one in notes(story)] == [(6, 3, 5)]


def test_a_bug_that_comes_again_after_the_step_was_trained_anew_is_one() -> None:
    story = life(life(begun(), POISONED, GOOD), POISONED, GOOD)
    life(story, GOOD, OLD, staged=(5,))
    life(story, CheckpointId(4, 5), GOOD)
    assert len(notes(story)) == 1
    assert story.verdict.message.endswith("; set aside before, which did not help: step 5 (attempt 1)")
    assert len(story.of(Launch)) == 5


def test_a_job_that_went_beyond_may_go_back_again_as_often() -> None:
    story = life(life(begun(set_aside_max=1), POISONED, GOOD), POISONED, GOOD)
    life(story, GOOD, OLD, KILLED, staged=(5, 7))
    life(life(story, CheckpointId(4, 7), CheckpointId(4, 5)), CheckpointId(4, 7), CheckpointId(4, 5))
    assert [one["step"] for one in notes(story)] == [5, 7]
    assert passed_over(story) == (POISONED, CheckpointId(4, 7)), "what was set aside before is not forgotten"


def test_steps_that_are_trained_again_are_progress() -> None:
    """Else a run that has gone far back would end by --restarts-max or --stall-seconds-max on its way."""
    story = life(life(begun(restarts_max=3, stall_seconds_max=100.0), POISONED, GOOD), POISONED, GOOD)
    for number in range(4, 9):
        life(story, GOOD, OLD, KILLED, staged=(number,))
        assert story.phase is SupervisorPhase.PAUSING
    assert [note.fields["newest_step"] for note in story.of(Note) if note.event == "launched"][3:5] == [3, 4]


def test_the_one_set_aside_is_no_progress_when_it_becomes_durable_at_last() -> None:
    story = life(life(begun(), POISONED, GOOD), POISONED, GOOD)
    story.wait().launch().tell(StepDurable(5, 1), StepDurable(6, 1)).end(KILLED)
    assert [note.fields["progressed"] for note in story.of(Note) if note.event == "ended"][-1] is False
    story.wait().launch().tell(StepDurable(4, 5)).end(KILLED)
    assert [note.fields["progressed"] for note in story.of(Note) if note.event == "ended"][-1] is True


def test_the_limit_on_restarts_is_kept_and_names_nothing_that_was_not_tried() -> None:
    story = life(life(begun(restarts_max=2), POISONED, GOOD), POISONED, GOOD)
    assert not notes(story)
    assert "3 attempts in a row" in story.verdict.message
    assert "set aside" not in story.verdict.message


def test_a_wrong_setting_is_none_of_a_checkpoints_faults() -> None:
    story = life(begun(), POISONED, GOOD, ProcessExited(0, 2))
    assert "a setting or the state is wrong" in story.verdict.message
