"""Nightly, more of tests/integration/test_in_flight.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.test_in_flight import STEPS, Stalled, _check
from tests.support.throttled_site import sitecustomize

pytestmark = [pytest.mark.mpi]


def test_a_single_area_declines_every_step_but_the_first(tmp_path: Path) -> None:
    run = Stalled(tmp_path)
    run.run(str(STEPS))
    _check(run, 1)
