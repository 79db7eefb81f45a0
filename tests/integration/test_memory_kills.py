"""A rank, the stager or the flusher killed for memory under `holdfast run`: reported as that.

The kernel's OOM killer cannot be aimed, so the test kills real processes by SIGKILL. The files of the control groups
are the test's own, mounted for this job: their counter goes up before the kill.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_run import SETTINGS
from tests.support.job import HOLDFAST, environment

pytestmark = [pytest.mark.mpi]
SECONDS_MAX = 250.0
_GROUPS = Path("/sys/fs/cgroup")

# Of each kind: whom the script finds, and kills.
_SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import psutil
import torch
from holdfast.ring.directory import runtime_directory
from trainer_side import Checkpointer

def kill(pid):
    for counter in map(Path, os.environ["COUNTERS"].split(":")):
        counter.write_text("oom_kill 1\\n")
    os.kill(pid, signal.SIGKILL)

def stager():
    for process in psutil.process_iter():
        try:
            words, ours = process.cmdline(), process.environ().get("HOLDFAST_RUNTIME_DIR")
        except psutil.Error:
            continue
        if ours == os.environ["HOLDFAST_RUNTIME_DIR"] and words[1:5] == ["-P", "-m", "holdfast", "stager"]:
            return process.pid

who, store = sys.argv[1:]
with Checkpointer({"value": torch.ones(8)}, every=1) as checkpointer:
    for step in range(checkpointer.restore(), 3):
        checkpointer.step(step)
        while checkpointer.staged_step < step:
            time.sleep(0.01)
        if step == 1 and who == "rank":
            kill(os.getpid())
        if step == 1 and who == "stager":
            kill(stager())
        if step == 1 and who == "flusher":
            folder = runtime_directory(store, Path(os.environ["HOLDFAST_RUNTIME_DIR"]))
            kill(int((folder / "flusher.pid").read_text().split()[0]))
"""


def counters(directory: Path) -> list[Path]:
    """Make files like those of this process's control groups, of either version."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            found.append(directory / "memory" / group.lstrip("/") / "memory.oom_control")
        elif not controllers:
            found.append(directory / group.lstrip("/") / "memory.events")
    for counter in found:
        counter.parent.mkdir(parents=True, exist_ok=True)
        counter.write_text("oom_kill 0\n")
    return found


def in_groups(directory: Path, *command: str) -> list[str]:
    """Return a command that sees these files as those of its control groups."""
    script = f'mount --bind {directory} {_GROUPS} && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, "sh", *command]


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    directory = tmp_path / "groups"
    directory.mkdir()
    made = subprocess.run(in_groups(directory, "true"), capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"nothing can be mounted here: {made.stderr}")
    return directory


@pytest.mark.parametrize(
    ("who", "code", "words"),
    [
        ("rank", 137, "was killed by the kernel because the memory was used up"),
        ("stager", 137, "the stager on {host} was killed by the kernel because the memory was used up"),
        ("flusher", 0, ") was killed by the kernel because the memory was used up: raise the limit"),
    ],
)
def test_a_memory_kill_is_named(tmp_path: Path, groups: Path, who: str, code: int, words: str) -> None:
    store = str(tmp_path / "store")
    run = [HOLDFAST, "run", "-n", "1", "--store", store, "--logs", str(tmp_path / "logs"), *SETTINGS]
    run += ["--restarts-max", "0", "--", sys.executable, "-c", _SCRIPT, who, store]
    found = counters(groups)
    done = subprocess.run(
        in_groups(groups, *run),
        env=environment(tmp_path / "runtime", COUNTERS=":".join(map(str, found))),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert words.format(host=os.uname().nodename) in done.stderr
    if who == "rank":
        assert f"rank 0 on {os.uname().nodename} was killed by the kernel" in done.stderr


def test_a_kill_that_the_kernel_does_not_count_is_one_from_outside(tmp_path: Path, groups: Path) -> None:
    counters(groups)
    rank = [HOLDFAST, "rank", "--", "sh", "-c", "kill -9 $$"]
    done = subprocess.run(
        in_groups(groups, *rank),
        env=environment(tmp_path / "runtime"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 137
    assert "was killed by SIGKILL from outside" in done.stderr
