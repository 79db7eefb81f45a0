"""`make gpu` rehearsed on the late device, and without any device; tests/soak has the other phases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import device_facts
from benchmarks.gpu.phases import PHASES, SECONDS, groups
from benchmarks.gpu.worker import NO_DEVICE
from tests.late.control import is_late
from tests.late.provision import NoLateRuntime, install

SECONDS_MAX = 900
SECONDS_TEXT = str(SECONDS_MAX - 60)
ROOT = Path(__file__).resolve().parents[2]
NVIDIA_SMI = "580.159.04, 5, 16, 700.00 W, Disabled"
WAY = {"call_ms", "stall_ms", "stall_queued_ms", "copy_seconds", "host_bytes", "consistent"}
# Phase ─► some of its figures.
FIGURES = {
    "facts": {"card", "driver", "torch", "commit", "device_bytes", "works"},
    "stall": {"bare_gb_per_second", "state_bytes", "open_seconds", "ways"},
    "jobs": {"jobs"},
    "exact": {"patterns"},
    "steps": {"saved_p99_ms", "none_p99_ms", "p99_ratio", "every"},
    "memory": {
        *("mirror_bytes", "kept_bytes", "kept_beside_torch_bytes", "kept_at_the_end_bytes"),
        *("asked_and_given_bytes", "full_save_taken"),
    },
    "waits": {"strategies", "many"},
    "peers-holdfast": {"ways"},
    "peers-lm_resiliency": {"ways"},
    "peers-dcp": {"ways"},
    "peers-torch_checkpointing": {"ways"},
    "bandwidths": {"bare_gb_per_second", "mirror_memory", "lane"},
    "tests": {"passed", "failed", "skipped"},
    "peers-torch_save": {"ways"},
    "peers-large": {"ways"},
}
UNTIMED = ["jobs", "exact", "tests"]
# Their packages are installed if the index has them.
MAY_LACK = {"peers-lm_resiliency", "peers-torch_checkpointing"}
ANSWERS = pytest.mark.parametrize(
    ("program", "driver"),
    [
        (f'echo "{NVIDIA_SMI}"', "580.159.04"),
        ('echo "580.1, [N/A], [N/A], [N/A], [N/A]"', "580.1"),
        ("echo No devices were found", None),
        (f'echo "{NVIDIA_SMI}"; exit 9', None),
        ("printf '\\377\\n'", None),
        ("sleep 60", None),
    ],
    ids=["a card", "no details", "no card", "failed", "no text", "hangs"],
)

pytestmark = [
    pytest.mark.skipif(is_late(), reason="this is that device"),
    pytest.mark.timeout(SECONDS_MAX),
]


def test_all_phases_together_take_200_seconds() -> None:
    assert SECONDS <= 200
    assert [phase.name for phase in PHASES] == list(FIGURES)
    shared = [phase for phase in PHASES if not phase.alone]
    assert all(phase.seconds_max > 0 for phase in PHASES)
    together = [[phase.name for phase in group] for group in groups(PHASES) if len(group) > 1]
    assert together == [["jobs", "exact"]], "nothing that is timed runs beside something else"
    assert {phase.name for phase in PHASES} - {phase.name for phase in shared} == set(UNTIMED)


@ANSWERS
def test_the_facts_are_there_whatever_nvidia_smi_answers(
    program: str, driver: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_facts, "_ASK_SECONDS_MAX", 1)
    monkeypatch.setenv("PATH", _nvidia_smi(tmp_path, program))
    assert device_facts.of_the_driver()["driver"] == driver


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so_and_ends_with_a_code_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "gpu", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert done.returncode == NO_DEVICE, done.stderr
    assert "no device" in done.stderr
    assert torch.__version__ in done.stderr
    assert [path.stem for path in tmp_path.glob("*.json")] == ["facts"]


def _nvidia_smi(folder: Path, program: str = f'echo "{NVIDIA_SMI}"') -> str:
    """A PATH that finds a fake nvidia-smi first."""
    (folder / "bin").mkdir()
    (folder / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\n{program}\n")
    (folder / "bin" / "nvidia-smi").chmod(0o755)
    return f"{folder / 'bin'}:{os.environ['PATH']}"


def _rehearsed(
    out: Path, *arguments: str, path: str = ""
) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    done = _on_the_late_device("-m", "benchmarks.gpu", "--quick", "--out", str(out), *arguments, path=path)
    return {one.stem: json.loads(one.read_text()) for one in out.glob("*.json")}, done


def _on_the_late_device(*arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    try:
        environment = install().environment(policy="lazy")
    except NoLateRuntime as reason:
        pytest.skip(str(reason))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment, **({"PATH": path} if path else {})},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


def _said(done: subprocess.CompletedProcess[str], found: dict[str, Any]) -> str:
    wrong = {name: line for name, line in found.items() if line["status"] != "done"}
    return f"{wrong}\n{done.stderr[-2000:]}"
