"""`holdfast drill` on real jobs: bugs that only a restart reveals, and causes that end a drill at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.jobs import drilled
from tests.support.cluster import SMALL
from tests.support.job import environment

pytestmark = [pytest.mark.mpi]
SECONDS_MAX = 280.0
_SETTINGS = [
    f"--set={name.removeprefix('--')}={value}" for name, value in zip(SMALL[::2], SMALL[1::2], strict=True)
]


def drill(directory: Path, *arguments: str, script: tuple[str, ...]) -> tuple[int, dict[str, Any], str]:
    """Exit code, the document, and what was said. Nothing of it is left."""
    runtime = directory / "runtime"
    line = [sys.executable, "-m", "holdfast", "drill", "-n", "2", "--json", "--dir", str(directory / "drill")]
    done = subprocess.run(
        [*line, *_SETTINGS, *arguments, "--", sys.executable, drilled.__file__, *script],
        env=environment(runtime),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert not left(runtime)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def left(runtime: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HOLDFAST_RUNTIME_DIR") == str(runtime) and process.status() != "zombie":
                found.append(f"{process.pid}: {' '.join(process.cmdline())}")
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def test_a_batch_that_is_drawn_ahead_is_named_in_one_line_and_the_runs_are_followed(tmp_path: Path) -> None:
    """As nanoGPT does. A log with times, in the same state, is no difference."""
    code, said, stderr = drill(
        tmp_path, "--kills", "1", "--with", "none", "--seed", "1", script=("40", "5", "ahead")
    )
    assert code == 1
    (kill,) = said["kills"]
    step = kill["resumed_from"] + 1
    assert kill["wrong"][0] == (
        f"only the batches differ, as far as can be seen: the state it resumed from is equal, but step {step} began "
        f"with the batch that the undisturbed run had 1 batch later, at step {step + 1}: the script had a batch in "
        "hand when it saved, and draws another one when it resumes. After restore(), draw through ResumableDraw "
        "(docs/data.md), or draw the batch of a step after the checkpoint before it"
    )
    assert "eval_runtime" not in str(kill["wrong"])
    assert said["measured"] == ["log/json/log_history/*/eval_runtime"]
    assert "holdfast drill: the undisturbed run: step 0 is done, " in stderr
    assert "holdfast drill: the run with kills: step 0 of 40 is done, " in stderr


@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_a_script_that_fails_by_itself_ends_the_drill_at_once_with_its_own_words(
    tmp_path: Path, launcher: str
) -> None:
    """Not after the restarts that a run with kills is given."""
    failing = tmp_path / "failing.py"
    failing.write_text('print("begins", flush=True)\nraise RuntimeError("the data is not there")\n')
    line = [sys.executable, "-m", "holdfast", "drill", "-n", "1", "--json", "--launcher", launcher]
    done = subprocess.run(
        [*line, "--dir", str(tmp_path / "drill"), *_SETTINGS, "--", sys.executable, str(failing)],
        env=environment(tmp_path / "runtime"),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    message = json.loads(done.stdout)["error"]["message"]
    assert "the script failed without any kill" in message
    assert "RuntimeError: the data is not there" in message
    assert "ChildFailedError" not in message
    reference = tmp_path / "drill" / "reference"
    output = (reference / "output.log").read_text()
    assert "attempt 2" not in output
    if launcher == "torchrun":
        assert output.count("begins\n") == 1
    assert not left(tmp_path / "runtime")


def test_a_directory_with_checkpoints_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "drill"
    run.mkdir()
    (run / "step-000000123.json").write_text("somebody's")
    code, said, _ = drill(tmp_path, script=("60", "10"))
    assert code == 2
    assert "never touches a run" in said["error"]["message"]
    assert [path.name for path in run.iterdir()] == ["step-000000123.json"]
