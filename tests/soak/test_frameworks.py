"""Nightly, more of tests/integration/test_frameworks.py: minutes, of which most are imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.test_frameworks import SECONDS_MAX, check_goes_on

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(4 * SECONDS_MAX)]


@pytest.mark.parametrize("name", ["transformers", "accelerate"])
def test_a_killed_run_goes_on_to_the_bit(tmp_path: Path, name: str) -> None:
    # A step is two batches of 16 on 2 ranks: 24 steps are an epoch. An evaluation follows each save.
    saves = {4, 9, 14, 19, 24, 29, 34, 39}
    check_goes_on(tmp_path, name, ("--steps", "40", "--every", "5"), saves, saved=29, pause_at=33)
