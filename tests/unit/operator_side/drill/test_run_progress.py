from __future__ import annotations

from operator_side.drill.run_progress import SECONDS_BETWEEN, RunProgress


def test_the_first_step_is_said_at_once_and_then_how_far_it_is_now_and_then() -> None:
    said: list[str] = []
    progress = RunProgress("the run", said.append, 100.0, steps=60)
    progress.look([], 100.0 + SECONDS_BETWEEN - 0.1)
    assert said == []
    progress.look([{"samples": [0]}], 100.0 + SECONDS_BETWEEN)
    progress.look([{"step": 0}, {"step": 1}], 111.0)
    progress.look([{"step": 2}], 111.1)
    progress.look([], 111.0 + SECONDS_BETWEEN)
    assert said == [
        "the run: no step is done yet, 10 s after its start",
        "the run: step 1 of 60 is done, 11 s after its start",
        "the run: step 2 of 60 is done, 21 s after its start",
    ]
