"""Nightly: jobs of tests/integration in the ways that are left out there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.test_notice_to_all import saves_the_last_finished_step
from tests.integration.test_peers import CASES, REGULAR, names_what_is_waited_for
from tests.integration.test_reordered import trains_on_in_another_order

pytestmark = [pytest.mark.mpi]


def test_the_last_finished_step_is_saved_in_local_tiers(tmp_path: Path) -> None:
    saves_the_last_finished_step(tmp_path, "tiers")


def test_ddp_trains_on_in_another_order(tmp_path: Path) -> None:
    trains_on_in_another_order(tmp_path, "ddp")


@pytest.mark.parametrize(("launcher", "case"), sorted(CASES - REGULAR))
def test_a_rank_that_is_waited_for_in_vain_is_named(launcher: str, case: str, tmp_path: Path) -> None:
    names_what_is_waited_for(launcher, case, tmp_path)
