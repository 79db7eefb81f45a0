"""Disks of their own for tests, and calls of the C library that fail: full, read-only, broken, slow, and whole again.

Disk: a small tmpfs, mounted ─► fill ─► no room     ─► make_room
                             ─► remounted read-only ─► writable again
Calls: a shim under LD_PRELOAD ─► fail("pwrite", EIO) ─► clear
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = ["Calls", "Disk"]

_SHIM = Path(__file__).with_name("failing_calls.c")


class Disk:
    """A small tmpfs.

    Args:
        place: Where it is mounted; made.
        nbytes: How much it holds.
    """

    def __init__(self, place: Path, nbytes: int) -> None:
        self.place = place
        place.mkdir(parents=True)
        self._mount("-t", "tmpfs", "-o", f"size={nbytes},mode=0700", "tmpfs", str(place))
        # A mount of its own over the first one can be made read-only by itself.
        self._mount("--bind", str(place), str(place))

    def fill(self, *, free_bytes: int) -> None:
        """Leave no more room than this. May be called again."""
        self.make_room()
        status = os.statvfs(self.place)
        used_bytes = status.f_bavail * status.f_frsize - free_bytes
        with self._filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, used_bytes))

    def make_room(self) -> None:
        """What filled it is gone."""
        self._filler.unlink(missing_ok=True)

    def make_read_only(self) -> None:
        """As an administrator does, or the kernel after an error."""
        self._mount("-o", "remount,bind,ro", str(self.place))

    def make_writable(self) -> None:
        """Mended."""
        self._mount("-o", "remount,bind,rw", str(self.place))

    def unmount(self) -> None:
        """Away with it, whoever still has files open."""
        for _ in range(2):
            subprocess.run(["umount", "--lazy", str(self.place)], check=False, capture_output=True)

    @property
    def _filler(self) -> Path:
        return self.place / "filler"

    def _mount(self, *arguments: str) -> None:
        try:
            subprocess.run(["mount", *arguments], check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"mounting is not allowed here: {getattr(error, 'stderr', '') or error}")


class Calls:
    """Calls of one process that fail below one directory, from now on or until `clear`.

    Args:
        directory: For the shim and its rules; made.
        below: Where they fail.
    """

    def __init__(self, directory: Path, below: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler (cc) to build the shim that lets calls fail")
        directory.mkdir()
        shim = directory / "failing_calls.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(shim), str(_SHIM)], check=True)
        self._rules = directory / "rules"
        self._rules.mkdir()
        self.environment = {
            "LD_PRELOAD": str(shim),
            "FAILING_CALLS": str(self._rules),
            "FAILING_BELOW": str(below),
        }

    def fail(self, call: str, number: int, *, times: int = 0, delay_ms: int = 0, named: str = "") -> None:
        """Let `call` fail with this errno (0: only late), this many times (0: until `clear`), on paths with `named`."""
        written = self._rules / f"{call}.new"
        written.write_text(f"{number} {times} {delay_ms} {named}")
        written.rename(self._rules / call)

    def hang(self, call: str) -> None:
        """Let `call` not return until `clear`."""
        self.fail(call, 0, delay_ms=-1)

    def clear(self) -> None:
        """All is well again."""
        for rule in self._rules.iterdir():
            rule.unlink()
