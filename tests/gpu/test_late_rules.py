"""What holds of saves and restores on any device, and of the device that is not there itself: tests/late."""

from __future__ import annotations

import pytest

from tests.late.control import is_late
from tests.late.running import ROOT, SECONDS_MAX, run_late

pytestmark = [pytest.mark.skipif(is_late(), reason="this is that device"), pytest.mark.timeout(SECONDS_MAX)]
# The other policies and the deliberate bugs take many minutes: tests/soak/test_late_policies.py, test_late_bugs.py.
POLICIES = "lazy"
BUGS = ROOT / "tests/late/test_planted_bugs.py"
# What looks at the memory of the whole process, or breaks its generator, has a process of its own.
ALONE = ("test_devices", "test_graphs", "test_locked_memory", "test_memory_asked_for")
_NAMES = sorted(path.stem for path in (ROOT / "tests/late").glob("test_*.py") if path != BUGS)
GROUPS = [[name] for name in ALONE] + [[name for name in _NAMES if name not in ALONE]]


def files(group: list[str]) -> list[str]:
    """The paths of these tests."""
    return [f"tests/late/{name}.py" for name in group]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group[0])
def test_the_rules_hold(group: list[str]) -> None:
    run_late("--policies", POLICIES, *files(group))
