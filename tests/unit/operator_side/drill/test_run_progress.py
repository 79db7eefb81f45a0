from __future__ import annotations

import pytest

from operator_side.drill.run_drill import PROGRESS_SECONDS, RunProgress, number_of_steps


def test_the_first_step_is_said_at_once_and_then_how_far_it_is_now_and_then() -> None:
    said: list[str] = []
    progress = RunProgress("the run", said.append, 100.0, steps=60)
    progress.update([], 100.0 + PROGRESS_SECONDS - 0.1)
    assert said == []
    progress.update([{"samples": [0]}], 100.0 + PROGRESS_SECONDS)
    progress.update([{"step": 0}, {"step": 1}], 111.0)
    progress.update([{"step": 2}], 111.1)
    progress.update([], 111.0 + PROGRESS_SECONDS)
    assert said == [
        "the run: no step is done yet, 10 s after its start",
        "the run: step 1 of 60 is done, 11 s after its start",
        "the run: step 2 of 60 is done, 21 s after its start",
    ]


@pytest.mark.parametrize(
    ("steps", "count"),
    [
        (range(40), 40),
        (range(1, 41), 40),  # of a script that counts from 1
        ([step for step in range(80) if step % 10 != 9 or step == 79], 80),  # Lightning's callback
        (range(9, 60, 10), 59),  # one call in ten steps
        ([0], 1),
    ],
)
def test_no_step_has_a_number_above_the_number_of_steps(steps: list[int], count: int) -> None:
    assert number_of_steps(steps) == count
    assert max(steps) <= count
