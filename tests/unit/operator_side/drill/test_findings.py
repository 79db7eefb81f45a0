from __future__ import annotations

from typing import Any

import pytest

from operator_side.drill.compare import Difference, FileComparison, constants
from operator_side.drill.findings import (
    ExecutedKill,
    Samples,
    compare_counters,
    compare_samples,
    examine_kills,
)
from operator_side.drill.kill_plan import Kill, KillTarget

LENGTH = 10
KILL = Kill(1, KillTarget.RANKS, notice=False, rank=0, after_step=2, delay_fraction=0.0)


def trained(attempt: int, first: int, last: int, *, place: int | None = None) -> list[dict[str, Any]]:
    """One rank, two samples in a step."""
    at = 2 * first if place is None else place
    lines: list[dict[str, Any]] = []
    for step in range(first, last + 1):
        common = {"time": 10.0 * attempt + step, "attempt": attempt, "rank": 0}
        lines += [{**common, "samples": [at // LENGTH, at % LENGTH, 2, LENGTH]}, {**common, "step": step}]
        at += 2
    return lines


REFERENCE = trained(1, 0, 9)


def counted(first: int, last: int, begin: int = 0) -> list[dict[str, Any]]:
    """One process: a counter that goes up at each step, and a number that never changes."""
    lines = []
    for step in range(first, last + 1):
        values = {
            "model/calls": begin + step - first + 1,
            **({"model/0.in_features": 4} if step == first else {}),
        }
        lines.append({"counters": {"step": step, "begins": step == first, "values": values}})
    return lines


def test_a_counter_that_a_resume_begins_again_is_named() -> None:
    found = compare_counters(counted(0, 9), [*counted(0, 6), *counted(4, 9)])
    assert found == ["model/calls is 6 after step 9, and 10 in the undisturbed run"]


def test_a_counter_that_is_saved_is_not_named() -> None:
    assert compare_counters(counted(0, 9), [*counted(0, 6), *counted(4, 9, begin=4)]) == []


def test_samples_trained_again_after_a_kill_are_not_repeated() -> None:
    assert compare_samples(REFERENCE, [*trained(1, 0, 6), *trained(2, 4, 9)]) == Samples(20, 0, 0)


def test_a_place_that_was_not_saved_repeats_and_skips() -> None:
    found = compare_samples(REFERENCE, [*trained(1, 0, 6), *trained(2, 4, 9, place=0)])
    assert found == Samples(20, 8, 8)


def test_a_batch_too_many_skips() -> None:
    assert compare_samples(REFERENCE, [*trained(1, 0, 6), *trained(2, 4, 9, place=10)]) == Samples(20, 2, 0)


def test_a_batch_that_the_dead_loop_had_got_does_not_count() -> None:
    begun = trained(1, 7, 7)[:1]
    assert compare_samples(REFERENCE, [*trained(1, 0, 6), *begun, *trained(2, 7, 9)]) == Samples(20, 0, 0)


def test_a_script_without_the_sampler_is_not_seen() -> None:
    lines = [line for line in REFERENCE if "step" in line]
    assert compare_samples(lines, lines) is None


def examined(*, resumed: int, staged: int = 3, files: list[FileComparison] | None = None) -> Any:
    status = [
        {"event": "lost", "time": 17.0},
        {"event": "ended", "time": 18.0},
        {"event": "launched", "time": 20.0},
        {"event": "joined", "time": 24.0},
        {"event": "restored", "time": 25.0, "step": resumed},
        {"event": "training", "time": 25.5},
    ]
    events = [{"event": "staged", "role": "stager", "step": staged, "time": 15.0}]
    (finding,) = examine_kills(
        [ExecutedKill(KILL, None, 16.5)],
        diary=trained(1, 0, 6),
        events=events,
        status=status,
        files=files or [],
    )
    return finding


def test_lost_work_and_phases_are_measured_from_the_kill() -> None:
    finding = examined(resumed=3, files=[FileComparison(7, 2, "step-7.pt", ())])
    assert (finding.last_step, finding.resumed_from, finding.lost_steps, finding.lost_seconds) == (
        6,
        3,
        3,
        3.5,
    )
    assert finding.phases == {
        "seen_seconds": 0.5,
        "ended_seconds": 1.5,
        "launched_seconds": 2.0,
        "joined_seconds": 4.0,
        "restored_seconds": 1.0,
        "training_seconds": 0.5,
        "seconds": 9.0,
    }
    assert finding.exact is True
    assert not finding.wrong


def test_a_staged_step_that_was_not_resumed_from_is_wrong() -> None:
    assert "step 5 was staged" in examined(resumed=3, staged=5).wrong[0]


def test_differing_values_are_named() -> None:
    differs = (Difference("model/0.weight", "CRC 1", "CRC 2"), Difference("scheduler/last_epoch", "7", "3"))
    finding = examined(resumed=3, files=[FileComparison(7, 2, "step-7.pt", differs)])
    assert finding.exact is False
    (why,) = finding.wrong
    assert "model/0.weight: its bytes differ, scheduler/last_epoch: 7 became 3" in why


@pytest.mark.parametrize(
    ("values", "constant"), [([("1", "2")] * 3, True), ([("1", "2"), ("1", "2"), ("1", "3")], False)]
)
def test_a_value_that_differs_between_runs_and_never_changes_is_a_constant(
    values: list[tuple[str, str]], constant: bool
) -> None:
    files = [
        FileComparison(step, 1, f"{step}", (Difference("rng", *pair),)) for step, pair in enumerate(values)
    ]
    assert constants(files, 0) == ({"rng"} if constant else set())
    assert constants([one._replace(step=one.step + 1) for one in files], 0) == set(), (
        "nothing was before the kill"
    )
