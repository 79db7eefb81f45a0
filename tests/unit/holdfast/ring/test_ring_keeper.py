"""The keeper of a ring: visible while it lives, gone with it, without leftovers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.ring.ring_keeper import RingKeeper, is_ring_kept

_HOLDS = """
import sys
from pathlib import Path
from holdfast.ring.ring_keeper import RingKeeper
keeper = RingKeeper(Path(sys.argv[1]))
print(flush=True)
sys.stdin.read()
"""


def test_a_ring_is_kept_until_the_last_keeper_lets_go(tmp_path: Path) -> None:
    directory = tmp_path / "machine" / "run"
    assert not is_ring_kept(directory)
    first, second = RingKeeper(directory), RingKeeper(directory)
    assert is_ring_kept(directory)
    first.close()
    assert is_ring_kept(directory), "the other one is there"
    second.close()
    second.close()
    assert not is_ring_kept(directory)
    assert not directory.exists()


def test_files_of_others_in_the_directory_stay(tmp_path: Path) -> None:
    keeper = RingKeeper(tmp_path / "run")
    (tmp_path / "run" / "journal").touch()
    keeper.close()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["journal"]


def test_the_kernel_takes_it_from_the_dead(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    line = [sys.executable, "-c", _HOLDS, str(directory)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert is_ring_kept(directory)
        process.kill()
        process.wait()
    assert (directory / "keeper").exists()
    assert not is_ring_kept(directory)
    assert not (directory / "keeper").exists()
    RingKeeper(directory).close()


def test_a_directory_that_others_may_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="0755"):
        RingKeeper(tmp_path / "run")
