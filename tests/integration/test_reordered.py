"""A real job resumes with reordered parameters and groups: each keeps its moments and settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forked_job import ForkedJob
from tests.support.job import environment

pytestmark = [pytest.mark.mpi]
_JOB = Path(__file__).with_name("jobs") / "reordered.py"  # not imported: torch's own modules for it warn
STEPS = 6


def _run(directory: Path, way: str, order: str, steps: int, store: str) -> dict[str, Any]:
    out = directory / f"{store}-{order}.pt"
    with ForkedJob(
        2,
        [str(_JOB), way, order, str(steps), str(out)],
        ["--store", str(directory / store), "--chunk-bytes", "64KiB", "--ring-bytes", "4MiB"],
        env=environment(directory / f"runtime-{store}"),
        log=directory / f"{store}-{order}.log",
    ) as job:
        job.succeed(240)
    found: dict[str, Any] = torch.load(out, weights_only=True)
    return found


def test_another_order_trains_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    trains_on_in_another_order(tmp_path, "fsdp")


def trains_on_in_another_order(tmp_path: Path, way: str) -> None:
    """The parameters of the optimizer are in another order than in the checkpoint; `way`: ddp or fsdp."""
    expected = _run(tmp_path, way, "abc", STEPS, "whole")
    _run(tmp_path, way, "abc", STEPS // 2, "parts")
    found = _run(tmp_path, way, "cab", STEPS, "parts")
    assert len(found) == len(expected) == 6
    for name, values in expected.items():
        assert found[name].keys() == values.keys() == {"value", "lr", "step", "exp_avg", "exp_avg_sq"}
        assert found[name]["lr"] == values["lr"], name
        for key in ("value", "step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(found[name][key], values[key]), (name, key)
    said = (tmp_path / "parts-cab.log").read_text()
    assert "optimizer: its parameters are in another order than in the checkpoint" in said
