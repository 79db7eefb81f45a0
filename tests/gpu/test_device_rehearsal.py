"""`make gpu` rehearsed on the late device: every phase writes its figures, and one that dies takes no other with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.__main__ import PHASES
from benchmarks.gpu.phase import NO_DEVICE
from tests.late.control import is_late
from tests.late.provision import NoLateRuntime, install

SECONDS_MAX = 600
ROOT = Path(__file__).resolve().parents[2]
# Phase ─► what its figures have among them.
FIGURES = {
    "facts": {"card", "driver", "torch", "commit", "device_bytes", "works"},
    "tests": {"passed", "failed", "skipped"},
    "bandwidths": {"bare_gb_per_second", "mirror_memory", "lane"},
    "stall": {"state_bytes", "ways"},
    "steps": {"modes", "every"},
    "memory": {
        *("mirror_bytes", "kept_bytes", "kept_beside_torch_bytes", "kept_at_the_end_bytes"),
        *("asked_and_given_bytes", "full_save_taken"),
    },
    "waits": {"strategies"},
    "resume": {"same_bits", "resumed"},
}

pytestmark = [
    pytest.mark.skipif(is_late(), reason="this is that device"),
    pytest.mark.timeout(SECONDS_MAX),
]


def test_every_phase_writes_its_figures(tmp_path: Path) -> None:
    done = _on_the_late_device("-m", "benchmarks.gpu", "--quick", "--out", str(tmp_path))
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert done.returncode == 0, _said(done, found)
    assert [phase.name for phase in PHASES] == list(FIGURES)
    for name, figures in FIGURES.items():
        assert found[name]["status"] == "done", found[name]
        assert figures <= found[name]["figures"].keys(), name
        assert found[name]["on"]["card"] == "Late (no device)"
    of = {name: document["figures"] for name, document in found.items()}
    assert of["tests"]["passed"] > 0
    assert of["tests"]["failed"] == []
    assert set(of["bandwidths"]["lane"]) == {"large_mirror", "large_gate", "small_mirror", "small_gate"}
    assert set(of["stall"]["ways"]) == {
        *("none", "dcp", "default", "slot_mirror", "slot_gate", "area_mirror", "area_gate")
    }
    assert all(way["saves"] for way in of["stall"]["ways"].values()), of["stall"]
    assert of["steps"]["modes"]["eager"]["default_steps"] == of["steps"]["modes"]["eager"]["none_steps"]
    assert of["memory"]["kept_bytes"] == of["memory"]["kept_at_the_end_bytes"] == 0
    assert of["memory"]["kept_beside_torch_bytes"] == 0
    assert of["memory"]["saved_again"]
    # `waited_for_the_queue` needs a device that takes time: here a wait of the copy thread, which may come at any
    # moment, does all that is queued. The waits of `save()` itself are counted in tests/late/test_saves.py.
    waits = of["waits"]["strategies"].values()
    assert [(one["taken"], one["synchronising_calls"]) for one in waits] == [(True, 0)] * 5
    assert of["resume"]["same_bits"] is True
    assert of["resume"]["resumed"]["first_step"] > 0


def test_a_phase_that_dies_loses_neither_its_figures_nor_the_others(tmp_path: Path) -> None:
    done = _on_the_late_device("-m", "tests.gpu.jobs.dying_phase", str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "phases.jsonl").read_text().splitlines()]
    found = {line["phase"]: line for line in lines}
    assert done.returncode == 1, _said(done, found)
    assert {name: line["status"] for name, line in found.items()} == {
        "facts": "done",
        "raises": "failed with exit code 1",
        "killed": "failed with exit code -9",
        "hangs": "out of time",
        "lacks": "left out",
        "last": "done",
        "late": "left out",
    }
    assert "planted" in found["raises"]["error"]
    assert "no_such_package" in found["lacks"]["error"]
    for name in ("raises", "killed", "hangs"):
        assert found[name]["figures"] == {"before": 1}, name
        assert found[name]["on"]["card"] == "Late (no device)"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so_and_ends_with_a_code_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "gpu", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert done.returncode == NO_DEVICE, done.stderr
    assert "no device" in done.stderr
    assert torch.__version__ in done.stderr
    assert [path.stem for path in tmp_path.glob("*.json")] == ["facts"]


def _on_the_late_device(*arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        environment = install().environment(policy="lazy")
    except NoLateRuntime as reason:
        pytest.skip(str(reason))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


def _said(done: subprocess.CompletedProcess[str], found: dict[str, Any]) -> str:
    wrong = {name: line for name, line in found.items() if line["status"] != "done"}
    return f"{wrong}\n{done.stderr[-2000:]}"
