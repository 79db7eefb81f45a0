"""Nightly, more of tests/integration/test_bad_input.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration import test_bad_input as nightly
from tests.integration.test_bad_input import check_a_rank_without_tiers, check_a_second_stager

pytestmark = [pytest.mark.mpi]

test_restore_passes_over_every_kind_of_damage_with_the_reason = (
    nightly.check_restore_passes_over_every_kind_of_damage_with_the_reason
)
test_a_second_stager_is_refused_and_the_first_goes_on = (
    nightly.check_a_second_stager_is_refused_and_the_first_goes_on
)
test_ranks_with_different_layouts = nightly.check_ranks_with_different_layouts


def test_a_second_stager_elsewhere_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    check_a_second_stager(tmp_path, beside=False)


def test_a_rank_without_tiers_beside_a_stager_is_refused_by_name(tmp_path: Path) -> None:
    check_a_rank_without_tiers(tmp_path, stager=True)
