"""One experiment from the command line to its JSON, with real ranks: it measures, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.experiments.makespan import cell

_SECONDS_MAX = 120


@pytest.mark.mpi
def test_an_experiment_measures_and_leaves_nothing(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    folder, out = tmp_path / "work", tmp_path / "workloads.json"
    folder.mkdir()
    command = [sys.executable, "-m", "benchmarks", "workloads", "--quick", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--folder", str(folder), "--out", str(out)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        timeout=_SECONDS_MAX,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(out.read_text())
    runs = document["runs"]
    peers = {"holdfast", "torch.save+fsync", "checkfreq", "pccheck-like"}
    assert {run["peer"] for run in runs} == {"none"} | peers
    for run in runs:
        assert run["saves"] == (run["iterations"] // run["every"] if run["peer"] in peers else 0)
    # Checkpoints in all iterations cost something: a peer that did nothing would cost nothing.
    cpu = {peer: cell(runs, peer, 1, "cpu_seconds")[0] for peer in ("none", "holdfast")}
    assert cpu["holdfast"] > cpu["none"]
    assert document["machine"]["cores"] == os.cpu_count()
    assert 0 <= document["stolen_share"] < 1
    assert "overhead" in done.stdout.lower()
    assert list(folder.iterdir()) == []
    left = [process.pid for process in psutil.process_iter() if str(folder) in " ".join(_words(process))]
    assert left == []


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
