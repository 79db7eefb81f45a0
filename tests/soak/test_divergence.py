"""Nightly, more of tests/integration/test_divergence.py."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from holdfast.image.replicas import ROW_BYTES, first_row, stride
from tests.integration import test_divergence as nightly
from tests.integration.jobs import drifting
from tests.integration.test_divergence import Outcome

pytestmark = [pytest.mark.mpi]

test_the_rank_that_drifted_is_named_by_majority = nightly.check_the_rank_that_drifted_is_named_by_majority
test_without_a_stager_rank_0_says_it_once = nightly.check_without_a_stager_rank_0_says_it_once


def test_a_run_without_drift_is_never_reported(tmp_path: Path) -> None:
    outcome = Outcome(tmp_path, "none", ranks=2, steps=20)
    assert outcome.published == set(range(20))
    assert not outcome.divergences
    assert "drifted apart" not in outcome.output
    assert len(outcome.saves) == 40
    assert all("fingerprint_seconds" in line for line in outcome.saves), "nothing was compared"


def test_two_diverging_ranks_are_both_named(tmp_path: Path) -> None:
    outcome = Outcome(tmp_path, "tensor", ranks=2)
    assert outcome.divergences[0]["undecided"] == {"model/module.head.weight": [[0], [1]]}
    assert "rank 0 and rank 1 differ from each other in model/module.head.weight" in outcome.output


def test_rows_that_one_checkpoint_skips_are_compared_at_a_later_one(tmp_path: Path) -> None:
    rows_apart = stride(4 * drifting.HIDDEN_NUMEL)
    assert rows_apart > 1
    row = 4 * drifting.HIDDEN_ELEMENT // ROW_BYTES
    sees_it = (
        step for step in itertools.count(drifting.DRIFT_AT) if first_row(step, rows_apart) == row % rows_apart
    )
    expected = next(sees_it)
    assert expected > drifting.DRIFT_AT, "the first one sees it already"
    outcome = Outcome(tmp_path, "hidden", ranks=2, steps=expected + 2)
    (said,) = outcome.divergences
    assert (said["step"], said["undecided"]) == (expected, {"model/module.large": [[0], [1]]})
