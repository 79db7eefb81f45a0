"""Runs the tests of tests/late: rules of saves and restores on any device, and of the late device itself."""

from __future__ import annotations

import pytest

from tests.late.control import is_late
from tests.late.running import ROOT, SECONDS_MAX, run_late_files

pytestmark = [pytest.mark.skipif(is_late(), reason="this is that device"), pytest.mark.timeout(SECONDS_MAX)]
# The other policies and the deliberate bugs take many minutes: tests/soak/test_late_policies.py, test_late_bugs.py.
POLICIES = "lazy"
BUGS = ROOT / "tests/late/test_planted_bugs.py"
FILES = sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "tests/late").glob("test_*.py") if path != BUGS
)


def test_the_rules_hold() -> None:
    run_late_files(POLICIES, FILES)
