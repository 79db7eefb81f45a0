"""tests/gpu and tests/late under those policies of the late runtime that `make rest` leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.test_late_rules import FILES
from tests.gpu.test_on_the_late_device import WAYS, resumes_exactly
from tests.late.running import run_late, run_late_files

pytestmark = pytest.mark.timeout(1800)
POLICIES = pytest.mark.parametrize("policy", ["side_lazy", "eager", "dice:1"])


@POLICIES
def test_the_rules_hold(policy: str) -> None:
    run_late_files(policy, FILES)


@POLICIES
def test_copies_are_right(policy: str) -> None:
    run_late("--policies", policy, "tests/gpu")


@pytest.mark.mpi
@pytest.mark.parametrize("way", [name for name, is_regular in WAYS.items() if not is_regular])
def test_ranks_on_devices_are_killed_and_go_on_exactly(tmp_path: Path, way: str) -> None:
    resumes_exactly(tmp_path, way)
