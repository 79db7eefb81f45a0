"""The test suite itself: a hung test harms no other, any way to start the tests works, and a budget is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.job import REPOSITORY

_CONFTEST = "from tests.conftest import pytest_addoption, pytest_configure\n"
_HANGING = """
import os, subprocess, sys
from pathlib import Path
import pytest

HERE = Path(__file__).parent

@pytest.fixture(scope="module")
def server():
    with subprocess.Popen(["sleep", "600"]) as process:
        (HERE / "server").write_text(str(process.pid))
        yield process
        process.kill()

@pytest.mark.timeout(2)
@pytest.mark.parametrize("env", [None, {}], ids=["same environment", "its own"])
def test_hangs(server, env):
    code = (
        "import subprocess, time\\n"
        "print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)\\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=-1, text=True, env=env) as process:
        with (HERE / "started").open("a") as file:
            file.write(f"{process.pid} {process.stdout.readline()}")
        process.wait()

def test_after_it(server):
    assert server.poll() is None, "it is for others as well"
    (HERE / "worker").write_text(os.environ["PYTEST_XDIST_WORKER"])
"""
_DEAR = """
import subprocess, sys

def test_dear():
    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 1: pass"], check=True)

def test_cheap():
    pass
"""


def pytest_in(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on a folder of its own, with this suite's plugins."""
    (directory / "conftest.py").write_text(_CONFTEST)
    return run_pytest(
        directory, f"--rootdir={directory}", "-c", os.devnull, "--import-mode=importlib", *arguments
    )


def run_pytest(
    directory: Path, *arguments: str, before: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [*before, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=directory,
        env=env | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_hung_test_fails_by_name_ends_its_children_and_leaves_its_worker_alive(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(_HANGING)
    done = pytest_in(tmp_path, "--numprocesses", "1", "--timeout-method=signal")
    assert done.returncode == 1, done.stdout
    for name in ("same environment", "its own"):
        assert f"FAILED test_it.py::test_hangs[{name}] - Failed: Timeout" in done.stdout, done.stdout
    assert "2 failed, 1 passed" in done.stdout
    assert "crashed" not in done.stdout
    assert (tmp_path / "worker").read_text() == "gw0"
    started = [int(word) for word in (tmp_path / "started").read_text().split()]
    assert len(started) == 4
    assert not [pid for pid in started if is_alive(pid)]


def is_alive(pid: int) -> bool:
    """An orphan that was killed is the first process's to wait for, which may take its time."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_unit_test_over_its_budget_fails_with_its_children_counted(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "unit"
    folder.mkdir(parents=True)
    (folder / "test_it.py").write_text(_DEAR)
    done = pytest_in(tmp_path, "--unit-cpu-seconds-max", "0.2")
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "test_dear took 1." in done.stdout
    assert "s of CPU in all" in done.stdout
    assert pytest_in(tmp_path, "--unit-cpu-seconds-max", "5").returncode == 0


def test_tests_that_have_not_begun_in_time_are_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(_DEAR)
    done = pytest_in(tmp_path, "-n", "1", "--begin-seconds-max", "1e-9")
    assert done.returncode == 0, done.stdout
    assert "2 tests are left out: none begins after 1e-09 seconds" in done.stdout
    assert "2 skipped" in done.stdout
