"""Another user of the stager's machine sees nothing of the ring, reaches no socket, and cannot plant files that are
used.

A real process with another uid tries all this; only root can start one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.ring.directory import open_private_file
from holdfast.ring.ring import Ring
from tests.support.stager_client import FlusherProcess, StagerClient

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")

STRANGER = 65534
_TRY = """
import json, os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
directory = sys.argv[1]
def attempt(act):
    try:
        act()
    except OSError as error:
        return type(error).__name__
    return "done"
def connect():
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.connect(os.path.join(directory, "flusher.sock"))
acts = {"list": lambda: os.listdir(directory), "connect": connect,
        "plant": lambda: os.symlink("/etc/passwd", os.path.join(directory, "layout-0123456789abcdef")),
        "remove": lambda: os.unlink(os.path.join(directory, "ring")),
        "move": lambda: os.rename(directory, directory + "-moved")}
for name in ("ring", "journal", "flusher.pid"):
    for mode, flags in (("read", os.O_RDONLY), ("write", os.O_RDWR)):
        acts[f"{mode} {name}"] = lambda name=name, flags=flags: os.open(os.path.join(directory, name), flags)
print(json.dumps({name: attempt(act) for name, act in acts.items()}))
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory like /dev/shm: writable for all, and sticky."""
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


def _as_stranger(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        cwd="/",
    )
    return done.stdout


def test_the_ring_of_a_running_flusher_is_closed_to_others(shared: Path) -> None:
    flusher = FlusherProcess(shared)
    try:
        stager = StagerClient(flusher.directory)
        names = {path.name for path in flusher.directory.iterdir()}
        assert {"ring", "journal", "flusher.sock", "flusher.pid"} <= names
        # Even if the directories above allow access.
        for above in (flusher.directory.parent, shared):
            above.chmod(above.stat().st_mode | 0o111)
        said = json.loads(_as_stranger(_TRY, str(flusher.directory)))
        assert len(said) == 11
        assert set(said.values()) == {"PermissionError"}, said
        # Even with access to the directory (a mode changed by hand) each file is unreadable.
        flusher.directory.chmod(0o755)
        said = json.loads(_as_stranger(_TRY, str(flusher.directory)))
        said.pop("list")
        assert set(said.values()) == {"PermissionError"}, said
        flusher.directory.chmod(0o700)
        assert {path.name for path in flusher.directory.iterdir()} == names
        for path in flusher.directory.iterdir():
            assert path.lstat().st_mode & 0o077 == 0, path
        stager.finish()
        assert flusher.wait() == 0
    finally:
        if flusher.process.poll() is None:
            flusher.kill()


_PLANT = """
import os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
where, kind, target = sys.argv[1:]
if kind == "directory":
    os.mkdir(where, 0o777); os.chmod(where, 0o777)
elif kind == "own directory inside":
    os.mkdir(where, 0o755); os.mkdir(os.path.join(where, "run"), 0o700)
else:
    os.symlink(target, where)
"""


@pytest.mark.parametrize("kind", ["directory", "own directory inside", "link"])
def test_paths_planted_by_a_stranger_are_not_used(shared: Path, kind: str) -> None:
    """Any user can guess the name `/dev/shm/holdfast-0`, and create it first."""
    base, elsewhere = shared / "holdfast-0", shared / "elsewhere"
    elsewhere.mkdir(mode=0o777)
    elsewhere.chmod(0o777)
    _as_stranger(_PLANT, str(base), kind, str(elsewhere))
    with pytest.raises(ConfigError, match="runtime directory"):
        Ring.create(base / "run", chunk_bytes=4096, ring_chunks=2, attempt=1)
    assert [path for path in shared.rglob("*") if path.is_file()] == [], "something was written"


def test_links_and_files_of_others_in_our_directory_are_not_opened(shared: Path) -> None:
    directory = shared / "mine" / "run"
    with Ring.create(directory, chunk_bytes=4096, ring_chunks=2, attempt=1):
        pass
    secret = shared / "secret"
    secret.write_text("not theirs")
    for name in ("layout-0123456789abcdef", "checkpoint-1-2.json"):
        (directory / name).symlink_to(secret)
        with pytest.raises(ConfigError, match="cannot be opened"):
            open_private_file(directory / name, os.O_RDONLY)
        (directory / name).unlink()
        (directory / name).write_text("{}")
        os.chown(directory / name, STRANGER, STRANGER)
        with pytest.raises(ConfigError, match="expected a regular file of uid 0"):
            open_private_file(directory / name, os.O_RDONLY)
    os.mkfifo(directory / "pipe")
    with pytest.raises(ConfigError, match="regular file"):
        open_private_file(directory / "pipe", os.O_RDWR)
    os.chown(directory / "journal", STRANGER, STRANGER)
    with pytest.raises(ConfigError, match="expected a regular file of uid 0"):
        Ring.attach(directory)
