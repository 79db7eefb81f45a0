"""All deliberate bugs except those in tests/simulation: the simulation detects each within its number of seeds."""

from __future__ import annotations

import pytest

from tests.simulation.test_mutations import ALL, ALWAYS, SECONDS_MAX, look_for


@pytest.mark.timeout(SECONDS_MAX + 60)
@pytest.mark.parametrize("name", sorted(ALL.keys() - ALWAYS))
def test_the_bug_is_seen(name: str) -> None:
    look_for(name)
