"""Nightly, more of tests/integration/test_restore_tiers.py."""

from __future__ import annotations

import pytest

from tests.integration import test_restore_tiers as nightly
from tests.integration.test_restore_tiers import Cluster, cluster

pytestmark = [pytest.mark.mpi]

test_a_rank_that_is_killed_while_it_restores_changes_nothing = (
    nightly.check_a_rank_that_is_killed_while_it_restores_changes_nothing
)


def test_three_ranks_go_on_from_what_two_have_kept(cluster: Cluster) -> None:
    cluster.save(2, 5, 6)
    reports = cluster.restore(3)
    assert [(report["step"], report["own"]) for report in reports] == [(5, 0), (5, 1), (5, -1)]
    assert reports[2]["sources"] == {}
