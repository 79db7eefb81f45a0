"""Nightly: the tests of tests/integration/test_split.py fail without the proof of replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.test_split import Outcome

pytestmark = [pytest.mark.mpi]


@pytest.mark.parametrize("stager", [True, False], ids=["beside a stager", "alone"])
def test_without_the_proof_split_state_would_be_published(tmp_path: Path, stager: bool) -> None:
    """A deliberate bug: no proof."""
    outcome = Outcome(tmp_path, "unproven", stager=stager)
    assert [said["tp_plain"].get("saved") for said in outcome.said] == [True, True], outcome.said
    assert outcome.published == {0}
