from __future__ import annotations

from typing import Any

import pytest

from operator_side.drill.batches import explain_different_batches
from operator_side.drill.findings import ExecutedKill, KillFinding
from operator_side.drill.kill_plan import Kill, KillTarget

RANKS = 2


def trained(first: int, batches: list[int], at: float) -> list[dict[str, Any]]:
    """Return the records of both ranks, each with its own batches."""
    return [
        {"time": at + place, "rank": rank, "batches": {"step": first + place, "crcs": [1000 * rank + crc]}}
        for place, crc in enumerate(batches)
        for rank in range(RANKS)
    ]


WHOLE = trained(0, [*range(10)], 0.0)


def wrong_after(
    resumed: list[tuple[int, list[int]]],
    *,
    unequal: tuple[int, ...] = (),
    reference: list[dict[str, Any]] = WHOLE,
) -> list[list[str]]:
    """Return the findings for each kill, given the resumed step and the batches after it."""
    drilled, struck, findings = WHOLE[: 6 * RANKS], [], []
    for number, (first, batches) in enumerate(resumed, 1):
        at = 100.0 * number
        kill = Kill(number, KillTarget.RANKS, notice=False, rank=0, after_step=first, delay_fraction=0.0)
        struck.append(ExecutedKill(kill, None, at))
        findings.append(KillFinding(kill, resumed_from=first - 1, unequal=[9] if number in unequal else []))
        drilled = [*drilled, *trained(first, batches, at + 1)]
    explain_different_batches(findings, struck, reference, drilled)
    return [finding.wrong for finding in findings]


def test_the_same_batches_are_nothing_to_speak_of() -> None:
    assert wrong_after([(4, [4, 5, 6]), (6, [6, 7])]) == [[], []]


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        (
            [5, 6, 7],
            "that the undisturbed run had 1 batch later, at step 5: the script had a batch in hand when it saved",
        ),
        ([3, 4, 5], "had 1 batch earlier, at step 3: the script trains again on the last batch before"),
        ([0, 1, 2], "the undisturbed run had 4 batches earlier, at step 0: the script begins its data again"),
        ([0, 5, 6], "4 batches earlier, at step 0: the script draws its first batch before restore()"),
        (
            [77, 5, 6],
            "a batch that the undisturbed run never had: the script draws its first batch before restore()",
        ),
        (
            [77, 78],
            "step 4 began with a batch that the undisturbed run never had: save the place in the data",
        ),
    ],
)
def test_another_batch_is_named_as_what_it_is(batches: list[int], words: str) -> None:
    ((said,),) = wrong_after([(4, batches)])
    assert said.startswith("only the batches differ, as far as can be seen: ")
    assert words in said


def test_random_batches_that_the_undisturbed_run_never_had_lead_to_the_batch_in_hand() -> None:
    """nanoGPT on a CPU does this: dropout and batches draw from the same generator."""
    ((said,),) = wrong_after([(4, [77, 78])])
    assert (
        "If the script saves them, it had a batch in hand when it saved: after restore(), draw through"
        in said
    )


def test_a_script_that_begins_again_after_its_first_batch_is_told_so() -> None:
    ((said,),) = wrong_after([(1, [0, 1])])
    assert "at step 0: the script begins its data again" in said


def test_kills_after_the_runs_have_parted_are_not_judged() -> None:
    first, second = wrong_after([(4, [5, 6, 7]), (6, [99])])
    assert len(first) == 1
    assert second == []
    assert wrong_after([(4, [4, 5]), (6, [99])], unequal=(1,)) == [[], []]
    assert [len(wrong) for wrong in wrong_after([(4, [4, 5]), (6, [99])])] == [0, 1]


def test_a_script_whose_batches_are_not_seen_is_left_alone() -> None:
    assert wrong_after([(4, [99])], reference=[]) == [[]]
    assert wrong_after([(4, [])]) == [[]]


def test_several_batches_of_a_step_each_count() -> None:
    """nanoGPT accumulates gradients, and the batch drawn ahead is the first of the next step."""
    first, second = {"step": 0, "crcs": [10, 11, 12]}, {"step": 1, "crcs": [13, 14, 15]}
    reference = [{"time": 0.0, "rank": 0, "batches": one} for one in (first, second)]
    resumed = {"time": 11.0, "rank": 0, "batches": {"step": 1, "crcs": [14, 15, 16]}}
    kill = Kill(1, KillTarget.RANKS, notice=False, rank=0, after_step=0, delay_fraction=0.0)
    finding = KillFinding(kill, resumed_from=0)
    explain_different_batches([finding], [ExecutedKill(kill, None, 10.0)], reference, [*reference, resumed])
    (said,) = finding.wrong
    assert (
        "step 1 began with the batch that the undisturbed run had 1 batch later, at step 1: the script had a"
        in said
    )
