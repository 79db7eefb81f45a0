"""The other tests of this folder, and those of the device itself, on a CUDA device that is not there (tests/late)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.late.control import is_late
from tests.late.provision import NoLateRuntime, install

SECONDS_MAX = 900
ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(is_late(), reason="this is that device")


@pytest.mark.parametrize("policy", ["side_lazy", "lazy", "eager", "dice:1"])
def test_copies_are_right_whenever_the_device_does_its_work(policy: str) -> None:
    _pytest("--policies", policy, "tests/gpu")


def test_the_rules_of_the_device_hold() -> None:
    _pytest("tests/late")


def _pytest(*arguments: str) -> None:
    try:
        install()
    except NoLateRuntime as reason:
        pytest.skip(str(reason))
    done = subprocess.run(
        [sys.executable, "-m", "tests.late", *arguments, "-q"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout, done.stdout
