"""Each deliberate bug in copies from a device is detected under some policy of the late runtime."""

from __future__ import annotations

import pytest

from tests.late.running import run_late


@pytest.mark.timeout(1800)
def test_each_deliberate_bug_tears_a_copy() -> None:
    run_late("tests/late/test_planted_bugs.py", "-o", "timeout=1200")
