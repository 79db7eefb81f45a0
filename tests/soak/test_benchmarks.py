"""One experiment from the command line to its JSON, with real ranks; it leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.experiments.makespan import cell

_SECONDS_MAX = 280  # five jobs of up to five processes, at toy size


@pytest.mark.mpi
def test_an_experiment_measures_and_leaves_nothing(tmp_path: Path) -> None:
    said, document = _measure("workloads", tmp_path)
    runs = document["runs"]
    peers = {"holdfast", "torch.save+fsync", "checkfreq", "pccheck-like"}
    assert {run["peer"] for run in runs} == {"none"} | peers
    for run in runs:
        assert run["saves"] == (run["iterations"] // run["every"] if run["peer"] in peers else 0)
    # Checkpoints in all iterations cost CPU; a peer that saved nothing would cost none.
    cpu = {peer: cell(runs, peer, 1, "cpu_seconds")[0] for peer in ("none", "holdfast")}
    assert cpu["holdfast"] > cpu["none"]
    assert document["machine"]["cores"] == os.cpu_count()
    assert 0 <= document["stolen_share"] < 1
    assert "overhead" in said.lower()


@pytest.mark.mpi
def test_every_way_to_one_file_of_a_split_state_is_measured_and_so_is_another_mesh(tmp_path: Path) -> None:
    _, document = _measure("sharded", tmp_path)
    peers = {"holdfast", "dcp+to-torch", "dcp-hf", "full-state-dict"}
    assert [(saved["mesh"], set(saved["rounds"][0])) for saved in document["cells"]] == [
        ("FSDP2 on 2", peers),
        ("FSDP2 on 4", peers),
        ("HSDP on 2 x 2", {"holdfast"}),
    ]
    for saved in document["cells"]:
        assert saved["sent_bytes"] == pytest.approx(saved["image_bytes"], rel=0.01)
        # Each rank has compared its part of the file: a half, a quarter, and a half with two replicas.
        part = 0.25 if saved["mesh"] == "FSDP2 on 4" else 0.5
        for of in saved["memory"]["ranks"].values():
            assert of["compared_bytes"] / saved["image_bytes"] == pytest.approx(part, rel=0.05)
    assert [of["mesh"] for of in document["restores"]] == ["FSDP2 on 2", "HSDP on 2 x 2"]
    for of in document["restores"]:
        for figures in of["rounds"]:
            assert figures["holdfast"]["bytes_read"] > 0
            assert set(figures) == {"holdfast", "dcp.load"}


def _measure(name: str, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """Run one round at toy size; return the output and the JSON. Checks that nothing is left behind."""
    root = Path(__file__).parents[2]
    folder, out = tmp_path / "work", tmp_path / f"{name}.json"
    folder.mkdir()
    command = [sys.executable, "-m", "benchmarks", name, "--quick", "--rounds", "1"]
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
    assert list(folder.iterdir()) == []
    left = [process.pid for process in psutil.process_iter() if str(folder) in " ".join(_words(process))]
    assert left == []
    return done.stdout, json.loads(out.read_text())


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
