"""Nightly, more of tests/integration/test_drill.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.jobs import drilled
from tests.integration.test_drill import _SETTINGS, SECONDS_MAX, drill, left
from tests.support.job import REPOSITORY, environment
from tests.support.signals import INTERRUPTIBLE

pytestmark = [pytest.mark.mpi]


def test_a_script_that_saves_all_goes_on_exactly(tmp_path: Path) -> None:
    """Two kills, one of them with a notice."""
    code, said, stderr = drill(tmp_path, "--kills", "2", "--seed", "4", script=("60", "10"))
    assert code == 0, f"{said}\n{stderr}"
    assert said["passed"]
    assert [bool(kill["notice"]) for kill in said["kills"]].count(True) == 1
    assert all(kill["exact"] and not kill["wrong"] for kill in said["kills"])
    assert said["files_compared"] >= 6
    assert said["files_differ"] == 0
    assert said["samples"] == {"trained": 60 * 2 * drilled.BATCH, "skipped": 0, "repeated": 0}
    for kill in said["kills"]:
        assert 0 <= kill["resumed_from"] <= kill["last_step"]
        assert kill["phases"].keys() >= {
            "ended_seconds",
            "launched_seconds",
            "restored_seconds",
            "training_seconds",
        }


def test_a_script_that_forgets_random_numbers_and_data_is_found_out(tmp_path: Path) -> None:
    code, said, _ = drill(
        tmp_path, "--kills", "1", "--with", "none", "--seed", "1", script=("60", "10", "rng", "data")
    )
    assert code == 1
    assert not said["passed"]
    (kill,) = said["kills"]
    assert kill["exact"] is False
    assert any("model/0.weight" in why for why in kill["wrong"]), kill["wrong"]
    assert "at step 0: the script begins its data again" in kill["wrong"][0]
    assert said["measured"] == ["log/json/log_history/*/eval_runtime"]
    assert said["samples"]["repeated"] > 0
    assert any(why.startswith("samples:") for why in said["wrong"]), said["wrong"]
    assert (tmp_path / "drill" / "drilled" / "store").is_dir(), "what failed is kept"


def test_every_kind_of_kill(tmp_path: Path) -> None:
    code, said, stderr = drill(tmp_path, "--kills", "4", "--with", "none", script=("80", "10"))
    assert code == 0, f"{said}\n{stderr}"
    names = {kill["what"] for kill in said["kills"]}
    assert {"all ranks", "stager and ranks", "the launcher"} < names
    assert len(names) == 4


@pytest.mark.parametrize("ways", ["none", "notice"])
def test_a_script_under_torchrun_goes_on_exactly(tmp_path: Path, ways: str) -> None:
    """torchrun restarts its workers; torchrun itself and the stager are killed too."""
    kills = {"none": "4", "notice": "2"}[ways]
    how = ("--launcher", "torchrun", "--kills", kills, "--with", ways, "--seed", "1")
    code, said, stderr = drill(tmp_path, *how, script=("80", "10"))
    assert code == 0, f"{said}\n{stderr}"
    assert all(kill["exact"] and not kill["wrong"] for kill in said["kills"])
    assert len({kill["what"] for kill in said["kills"]}) == int(kills)
    assert all("was saved because of it" in kill["notice"] for kill in said["kills"] if ways == "notice")
    assert said["files_compared"] >= 6
    assert said["files_differ"] == 0
    assert said["samples"] == {"trained": 80 * 2 * drilled.BATCH, "skipped": 0, "repeated": 0}


def test_a_bug_is_named_under_torchrun(tmp_path: Path) -> None:
    code, said, _ = drill(
        tmp_path, "--launcher", "torchrun", "--kills", "1", "--with", "none", script=("60", "10", "data")
    )
    assert code == 1
    assert said["samples"]["repeated"] > 0


def test_a_drill_that_is_interrupted_leaves_no_process(tmp_path: Path) -> None:
    runtime = tmp_path / "runtime"
    line = [
        *INTERRUPTIBLE,
        sys.executable,
        "-m",
        "holdfast",
        "drill",
        "-n",
        "2",
        "--dir",
        str(tmp_path / "drill"),
        *_SETTINGS,
    ]
    with subprocess.Popen(
        [*line, "--", sys.executable, drilled.__file__, "6000", "10"],
        env=environment(runtime),
        stderr=subprocess.PIPE,
    ) as process:
        diary = tmp_path / "drill" / "reference" / "logs" / "diary.jsonl"
        while process.poll() is None and not diary.exists():
            pass
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(SECONDS_MAX) == 130
    assert not left(runtime)


def test_times_in_the_log_of_trainer_are_no_difference(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    line = [sys.executable, "-m", "holdfast", "drill", "-n", "2", "--json", "--dir", str(tmp_path / "drill")]
    line += ["--kills", "1", "--with", "none", *_SETTINGS, "--", sys.executable]
    line += [str(REPOSITORY / "examples" / "train_transformers.py"), "--steps", "60", "--every", "10"]
    done = subprocess.run(
        line,
        env=environment(tmp_path / "runtime"),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    said = json.loads(done.stdout)
    assert done.returncode == 0, f"{said}\n{done.stderr}"
    assert said["files_compared"] == 6
    assert {name.rpartition("/")[2] for name in said["measured"]} >= {"eval_runtime", "train_loss"}
