"""All deliberate bugs but the handful of tests/simulation: the simulation sees each within so many seeds."""

from __future__ import annotations

import pytest

from tests.simulation.mutations import MUTATIONS
from tests.simulation.tcp_mutations import TCP_MUTATIONS
from tests.simulation.test_mutations import ALWAYS, SECONDS_MAX, look_for
from tests.simulation.tier_mutations import TIER_MUTATIONS


@pytest.mark.timeout(SECONDS_MAX + 60)
@pytest.mark.parametrize(
    "name", sorted((MUTATIONS.keys() | TCP_MUTATIONS.keys() | TIER_MUTATIONS.keys()) - ALWAYS)
)
def test_the_bug_is_seen(name: str) -> None:
    look_for(name)
