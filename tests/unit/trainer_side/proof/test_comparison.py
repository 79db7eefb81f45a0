"""Each difference after a resume is named, before and after; the rest is reported as equal."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from holdfast.wire.step_proof import ProofVerdict
from trainer_side.proof.comparison import Comparison, compare, resume_proof
from trainer_side.proof.step_digest import StepDigest

BEFORE = StepDigest(
    11,
    data={"data": {"from": [0, 80], "to": [0, 88]}},
    batch=0xABCD,
    generators={"torch": 1, "NumPy": 2},
    classes={"optimizer": "Adam"},
    rates={"optimizer": (3e-4,)},
    loss=2.5,
    grad_norm=0.5,
)


def verdict(now: StepDigest, *, ranks_before: int = 1, ranks: int = 1) -> tuple[ProofVerdict, str]:
    each = compare(BEFORE, now, same_ranks=ranks_before == ranks)
    told = Comparison.from_json(each.to_json())
    assert told == each, "the other ranks hear the same"
    return resume_proof([each] * ranks, ranks_before=ranks_before)


def changed(**fields: Any) -> StepDigest:
    return dataclasses.replace(BEFORE, **fields)


def test_an_equal_step_verifies_all_that_was_recorded() -> None:
    said = "resume verified: data, random numbers, learning rate, loss and gradient norm are those of the run before"
    assert verdict(BEFORE) == (ProofVerdict.VERIFIED, said)
    assert verdict(changed(grad_norm=None))[1] == (
        "resume verified: data, random numbers, learning rate and loss are those of the run before"
    )


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (
            changed(rates={"optimizer": (1e-3,)}),
            "that of optimizer was 0.0003 before, and is 0.001): is the scheduler in",
        ),
        (changed(rates={"optimizer": (3e-4, 1e-5)}), "is 0.0003, 1e-05"),
        (
            changed(data={"data": {"from": [0, 88], "to": [0, 96]}}),
            "data differ (data began at epoch 0, sample 80 before, and at epoch 0, sample 88 now)",
        ),
        (changed(data={"data": {"from": [0, 80], "to": [1, 4]}}), "ended at epoch 0, sample 88 before"),
        (changed(batch=1), "data differ (the batch has CRC-32 00000001, and had 0000abcd)"),
        (
            changed(generators={"torch": 1, "NumPy": 3}),
            "random numbers differ (the generator of NumPy is in another",
        ),
        (
            changed(classes={"optimizer": "RAdam"}),
            "class differs (optimizer was Adam before, and is RAdam): the checkpoint has the state of",
        ),
        (changed(loss=2.6), "loss differs (2.5 before, 2.6 now)"),
        (changed(loss=math.nan), "loss differs (2.5 before, nan now)"),
        (changed(grad_norm=0.9), "gradient norm differs (0.5 before, 0.9 now)"),
    ],
)
def test_a_difference_is_named_with_before_and_now(now: StepDigest, said: str) -> None:
    found, text = verdict(now)
    assert found is ProofVerdict.DIFFERS
    assert said in text


def test_last_digits_of_the_loss_are_no_difference_unless_its_inputs_differ() -> None:
    found, text = verdict(changed(loss=2.5000001))
    assert found is ProofVerdict.VERIFIED
    assert "the loss differs in its last digits only (2.5 before, 2.5000001 now)" in text
    found, text = verdict(changed(loss=2.5000001, batch=7))
    assert found is ProofVerdict.DIFFERS
    assert "loss differs" in text


def test_other_ranks_are_compared_by_what_all_share() -> None:
    now = changed(data={"data": {"from": [0, 80], "to": [0, 92]}}, batch=7, generators={"torch": 5}, loss=9.0)
    found, text = verdict(now, ranks_before=2, ranks=3)
    assert found is ProofVerdict.VERIFIED
    assert text == (
        "resume verified: the place in the data and learning rate are those of the run before; 3 ranks instead of 2, "
        "so each rank's batches, random numbers and loss cannot be compared"
    )
    found, text = verdict(changed(data={"data": {"from": [0, 84], "to": [0, 96]}}), ranks_before=2, ranks=3)
    assert found is ProofVerdict.DIFFERS
    assert "3 ranks instead of 2" in text


def test_another_class_is_a_difference_on_any_number_of_ranks_and_an_equal_one_proves_nothing() -> None:
    found, text = verdict(changed(classes={"optimizer": "RAdam"}), ranks_before=2, ranks=3)
    assert found is ProofVerdict.DIFFERS
    assert "class differs on every rank (optimizer was Adam before, and is RAdam)" in text
    only = StepDigest(11, classes={"optimizer": "Adam"})
    assert resume_proof([compare(only, only, same_ranks=True)], ranks_before=1).verdict is (
        ProofVerdict.NOT_PROVEN
    )


def test_a_resume_without_known_data_says_so() -> None:
    before, now = StepDigest(11, rates={"o": (0.1,)}), StepDigest(11, rates={"o": (0.1,)})
    proof = resume_proof([compare(before, now, same_ranks=True)], ranks_before=1)
    assert proof.text == (
        "resume verified: learning rate is that of the run before; data could not be compared: give step() the batch, "
        "or put a ResumableSampler into the state"
    )


def test_a_digest_without_common_fields_proves_nothing() -> None:
    proof = resume_proof([compare(StepDigest(11), BEFORE, same_ranks=True)], ranks_before=1)
    assert proof.verdict is ProofVerdict.NOT_PROVEN


def test_the_ranks_that_differ_are_named() -> None:
    fine, other = compare(BEFORE, BEFORE, same_ranks=True), compare(BEFORE, changed(batch=1), same_ranks=True)
    assert "data differ on rank 2 (" in resume_proof([fine, fine, other], ranks_before=3).text
    assert "data differ on every rank (" in resume_proof([other, other], ranks_before=2).text


def test_ranks_of_which_nothing_is_recorded_are_named() -> None:
    fine = compare(BEFORE, BEFORE, same_ranks=True)
    other = compare(BEFORE, changed(batch=1), same_ranks=True)
    lost = resume_proof([None, None, fine], ranks_before=3)
    assert lost.verdict is ProofVerdict.NOT_PROVEN
    assert lost.text.startswith("resume not proven: nothing is recorded of rank 0, 1; data, random numbers, ")
    assert lost.text.endswith(" are those of the run before on rank 2")
    differs = resume_proof([None, other], ranks_before=2)
    assert differs.verdict is ProofVerdict.DIFFERS
    assert "data differ on rank 1 (" in differs.text
    assert differs.text.endswith("; nothing is recorded of rank 0")


def test_a_digest_survives_its_json() -> None:
    digest = changed(loss=math.inf)
    assert StepDigest.from_json(digest.to_json()) == digest
    assert math.isnan(StepDigest.from_json(changed(loss=math.nan).to_json()).loss or 0.0)
    with pytest.raises(ValueError, match="no digest of a step"):
        StepDigest.from_json({"step": 3, "lr": 5})
