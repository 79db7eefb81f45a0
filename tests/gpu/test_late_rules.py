"""What holds of saves and restores on any device, and of the device that is not there itself: tests/late."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.late.control import is_late
from tests.late.running import ROOT, SECONDS_MAX, run_late

pytestmark = [pytest.mark.skipif(is_late(), reason="this is that device"), pytest.mark.timeout(SECONDS_MAX)]
# Every deliberate bug under every policy takes minutes: tests/soak/test_late_bugs.py.
BUGS = ROOT / "tests/late/test_planted_bugs.py"
FILES = sorted(path for path in (ROOT / "tests/late").glob("test_*.py") if path != BUGS)


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_the_rules_hold(file: Path) -> None:
    run_late(str(file.relative_to(ROOT)))
