"""Leftovers of a killed mpirun, and the next one that gets its process id."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.mpirun import mpirun_command
from tests.support.cluster import wait_until

_LAST_PID = Path("/proc/sys/kernel/ns_last_pid")


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # Of its own: another test's launcher would clean up what this one looks at. Short: it holds sockets.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="hf") as name:
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(name)


def _killed(command: list[str], temporary: Path) -> int:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    left = temporary / f"ompi.{process.pid}"
    try:
        wait_until(lambda: any(left.glob("pmix.*.tool.*")), 60.0, "mpirun did not start")
    finally:
        process.kill()
        process.wait(60.0)
    assert left.exists(), "nothing is left of it: this test shows nothing"
    return process.pid


def _started_as(pid: int, command: list[str]) -> subprocess.CompletedProcess[str] | None:
    _LAST_PID.write_text(str(pid - 1))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    out, _ = process.communicate(timeout=120.0)
    return subprocess.CompletedProcess(command, process.returncode, out) if process.pid == pid else None


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.access(_LAST_PID, os.W_OK), reason="choosing a process id needs root"
)
def test_an_mpirun_with_the_process_id_of_a_killed_one_starts(temporary: Path) -> None:
    for _ in range(10):
        pid = _killed(mpirun_command(1, ["sleep", "5"]), temporary)  # whom nobody ends
        done = _started_as(pid, mpirun_command(1, ["true"]))
        if done is not None:
            assert done.returncode == 0, done.stdout
            return
    pytest.skip("the process id was given to others ten times")


def test_session_directories_of_living_processes_or_other_hosts_stay(temporary: Path) -> None:
    elsewhere = temporary / "ompi.1234567"
    elsewhere.mkdir()
    (elsewhere / "pmix.another-host.tool.1234567").touch()
    process = subprocess.Popen(mpirun_command(1, ["sleep", "60"]), stdout=subprocess.DEVNULL)
    try:
        alive = temporary / f"ompi.{process.pid}"
        wait_until(lambda: any(alive.glob("pmix.*.tool.*")), 60.0, "mpirun did not start")
        mpirun_command(1, ["true"])
        assert alive.exists()
        assert elsewhere.exists()
    finally:
        process.terminate()
        process.wait(60.0)
