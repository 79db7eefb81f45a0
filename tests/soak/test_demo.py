"""Nightly, more of tests/integration/test_demo.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.test_demo import EVERY, STEPS, demo

pytestmark = [pytest.mark.mpi]


@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_a_killed_run_ends_as_the_uninterrupted_one(launcher: str, tmp_path: Path) -> None:
    out = tmp_path / "demo-run"
    done = demo(out, launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((out / "result.json").read_text())
    assert result["passed"]
    assert len(result["checks"]) >= 10
    figures = result["figures"]
    assert STEPS // 2 <= figures["killed_after_step"] < STEPS - 1
    assert 0 < figures["resumed_from_step"] <= figures["killed_after_step"]
    assert (figures["resumed_from_step"] + 1) % EVERY == 0
    for name in ("image_bytes", "cst_seconds", "pgt1_seconds", "pgt2_seconds", "restore_seconds"):
        assert figures[name], name
    assert "resumed from step" in done.stdout
