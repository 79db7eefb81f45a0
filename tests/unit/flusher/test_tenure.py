"""One flusher per run and machine, whatever files a dead one left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flusher.tenure import Instance
from holdfast.errors import ConfigError, FencedError

_HOLD = """
import sys, pathlib, time
from flusher.tenure import Instance
held = Instance(pathlib.Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_a_live_one_is_named_and_a_killed_one_is_no_obstacle(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(directory)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(FencedError, match=f"process {holder.pid} is already"):
        Instance(directory)
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert (directory / "flusher.pid").exists()
    Instance(directory).release(keep_directory=False)
    assert not directory.exists()


def test_released_keeps_the_directory_if_asked_or_not_empty(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    Instance(directory).release(keep_directory=True)
    assert list(directory.iterdir()) == []
    held = Instance(directory)
    (directory / "ring").touch()
    held.release(keep_directory=False)
    assert [path.name for path in directory.iterdir()] == ["ring"]


def test_a_link_in_place_of_the_pid_file_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (directory / "flusher.pid").symlink_to(victim)
    with pytest.raises(ConfigError):
        Instance(directory)
    assert victim.read_text() == "precious"
