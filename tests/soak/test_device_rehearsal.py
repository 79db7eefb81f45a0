"""`make gpu` on the late device: each phase writes its figures, and published files are exact. Takes many minutes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.exact import PATTERNS
from benchmarks.gpu.jobs import KINDS
from tests.gpu.test_device_rehearsal import (
    FIGURES,
    MAY_LACK,
    SECONDS_MAX,
    SECONDS_TEXT,
    UNTIMED,
    WAY,
    _nvidia_smi,
    _on_the_late_device,
    _rehearsed,
    _said,
)

pytestmark = pytest.mark.timeout(2 * SECONDS_MAX)


def test_timed_phases_write_their_figures(tmp_path: Path) -> None:
    names = [name for name in FIGURES if name not in UNTIMED]
    path = _nvidia_smi(tmp_path)
    found, done = _rehearsed(tmp_path, "--seconds", SECONDS_TEXT, "--phases", ",".join(names), path=path)
    of = _figures(found, done, names)
    _check_ways(of)
    assert all(document["on"]["driver"] == "580.159.04" for document in found.values())
    assert set(of["bandwidths"]["lane"]) == {"large_mirror", "large_gate", "small_mirror", "small_gate"}
    assert of["steps"]["saved_steps"] == of["steps"]["none_steps"] > 0
    assert of["steps"]["saves"] > 0
    assert of["memory"]["kept_bytes"] == of["memory"]["kept_at_the_end_bytes"] == 0
    assert of["memory"]["saved_again"]
    # `waited_for_the_queue` needs a device that takes time: here a wait of the copy thread, at any moment, runs all
    # queued work. tests/late/test_saves.py counts the waits of `save()` itself.
    waits = of["waits"]["strategies"].values()
    assert [(one["taken"], one["synchronising_calls"]) for one in waits] == [(True, 0)] * 5
    assert of["waits"]["many"]["stall_ms"] is not None
    report = (tmp_path / "report.md").read_text()
    assert "stall of" in report
    assert "p99 of step times" in report


def _figures(
    found: dict[str, Any], done: subprocess.CompletedProcess[str], names: list[str]
) -> dict[str, Any]:
    """Figures of these phases: all are present, and only a peer that cannot be installed is left out."""
    for name in names:
        if name in MAY_LACK and found[name]["status"] == "left out":
            assert "no package" in found[name]["error"]
            continue
        assert found[name]["status"] == "done", _said(done, found)
        assert FIGURES[name] <= found[name]["figures"].keys(), name
        assert found[name]["on"]["card"] == "Late (no device)"
    assert done.returncode == int(any(of["status"] != "done" for of in found.values())), _said(done, found)
    return {name: document["figures"] for name, document in found.items()}


def _check_ways(of: dict[str, Any]) -> None:
    """Check that holdfast and each peer have the compared figures, for both states, and a right copy."""
    ways = [way for figures in of.values() for way in figures.get("ways", ())]
    there = {"holdfast", "dcp", "torch_save"} | {
        name.removeprefix("peers-") for name in MAY_LACK if "ways" in of[name]
    }
    assert {(way["way"], way["size"]) for way in ways} == {
        (way, size) for way in there for size in ("large", "small") if (way, size) != ("torch_save", "large")
    }
    for way in ways:
        wanted = WAY - {"copy_seconds"} if way["way"] == "torch_save" else WAY
        assert wanted <= way.keys(), way
        assert way["consistent"] == "yes", way
        assert way["saves"] > 0, way
        assert way["changed_meanwhile"] == way["tensors"], way


def test_published_and_resumed_state_is_exact(tmp_path: Path) -> None:
    found, done = _rehearsed(tmp_path, "--seconds", SECONDS_TEXT, "--phases", ",".join(UNTIMED))
    of = _figures(found, done, UNTIMED)
    assert of["tests"]["passed"] > 0
    assert of["tests"]["failed"] == []
    patterns = of["exact"]["patterns"]
    assert {name: one["exact"] for name, one in patterns.items()} == dict.fromkeys(PATTERNS, 5)
    jobs = of["jobs"]["jobs"]
    assert {kind: one["same_bits"] for kind, one in jobs.items()} == dict.fromkeys(KINDS, True)
    # Step 8 may be saved before the kill.
    assert all(one["resumed_first_step"] in ([6], [9]) for one in jobs.values()), jobs
    assert jobs["ddp"]["ranks"] == 2


def test_a_phase_that_dies_loses_neither_its_figures_nor_the_others(tmp_path: Path) -> None:
    done = _on_the_late_device("-m", "tests.gpu.jobs.dying_phase", str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "phases.jsonl").read_text().splitlines()]
    found = {line["phase"]: line for line in lines}
    assert done.returncode == 1, _said(done, found)
    assert {name: line["status"] for name, line in found.items()} == {
        "facts": "done",
        "hangs": "out of time",
        "late": "left out",
        "first": "done",
        "raises": "failed with exit code 1",
        "second": "done",
        "killed": "failed with exit code -9",
        "third": "done",
        "lacks": "left out",
        "fourth": "done",
        "killed-alone": "failed with exit code -9",
        "beside": "done",
        "fifth": "done",
    }
    assert "planted" in found["raises"]["error"]
    assert "no_such_package" in found["lacks"]["error"]
    pids = {name: line["figures"]["pid"] for name, line in found.items() if "pid" in line.get("figures", {})}
    assert len(pids) == 11, "a phase that died has lost its figure"
    assert pids["first"] == pids["raises"] != pids["second"] == pids["killed"] != pids["third"]
    assert pids["hangs"] != pids["third"] == pids["lacks"] == pids["fourth"] == pids["fifth"]
    assert len({pids["killed-alone"], pids["beside"], pids["fifth"]}) == 3
    assert all(line["on"]["card"] == "Late (no device)" for line in found.values())
    left = Path(f"/proc/{found['hangs']['figures']['left']}/cmdline")
    assert not left.exists() or b"sleep" not in left.read_bytes(), "what the phase had started outlives it"
