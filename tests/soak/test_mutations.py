"""All deliberate bugs but the handful of tests/simulation: the simulation sees each within this many seeds."""

from __future__ import annotations

import pytest

from tests.simulation.test_mutations import ALL, ALWAYS, SECONDS_MAX, look_for


@pytest.mark.timeout(SECONDS_MAX + 60)
@pytest.mark.parametrize("name", sorted(ALL.keys() - ALWAYS))
def test_the_bug_is_seen(name: str) -> None:
    look_for(name)
