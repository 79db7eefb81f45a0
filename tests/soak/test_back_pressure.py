"""Nightly, more of tests/integration/test_back_pressure.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration import test_back_pressure as nightly
from tests.integration.test_back_pressure import MIB, RANKS, SMALL, Pressed, check_alike
from tests.support.cluster import load, same
from tests.support.throttled_site import sitecustomize

pytestmark = [pytest.mark.mpi]

test_a_killed_stager_costs_the_checkpoints_and_nothing_else = (
    nightly.check_a_killed_stager_costs_the_checkpoints_and_nothing_else
)
test_a_missed_wait_says_who_waited_for_whom = nightly.check_a_missed_wait_says_who_waited_for_whom


def test_on_full_wait_takes_every_step(tmp_path: Path) -> None:
    steps = 12
    run = Pressed(tmp_path, "together", steps, rate=40 * MIB, HOLDFAST_ON_FULL="wait", **SMALL)
    output = run.run()
    assert check_alike(run, steps) == steps
    assert "were not checkpointed" not in output
    for rank in range(RANKS):
        saves = run.events("save", rank=rank)
        assert len(saves) == steps
        waited = [line for line in saves if line["wait_seconds"] > 0]
        assert len(waited) >= steps // 2, "the store was not slow enough to wait for"
        assert all(line["cst_seconds"] >= line["save_seconds"] >= line["wait_seconds"] for line in saves)
