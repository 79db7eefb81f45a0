"""Faulty disks for tests, and failing calls of the C library: full, read-only, broken, slow, and healthy again.

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
        place: Mount point, which is created.
        nbytes: Size.
    """

    def __init__(self, place: Path, nbytes: int) -> None:
        self.place = place
        place.mkdir(parents=True)
        self._mount("-t", "tmpfs", "-o", f"size={nbytes},mode=0700", "tmpfs", str(place))
        # A bind mount over the first mount can be made read-only separately.
        self._mount("--bind", str(place), str(place))

    def fill(self, *, free_bytes: int) -> None:
        """Fill the disk, except for `free_bytes`. May be called again."""
        self.make_room()
        status = os.statvfs(self.place)
        used_bytes = status.f_bavail * status.f_frsize - free_bytes
        with self._filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, used_bytes))

    def make_room(self) -> None:
        """Remove the file that fills the disk."""
        self._filler.unlink(missing_ok=True)

    def make_read_only(self) -> None:
        """Remount read-only, as an administrator does, or the kernel after an error."""
        self._mount("-o", "remount,bind,ro", str(self.place))

    def make_writable(self) -> None:
        """Remount writable."""
        self._mount("-o", "remount,bind,rw", str(self.place))

    def unmount(self) -> None:
        """Unmount, even while processes have files open."""
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
        directory: For the shim and its rules; created.
        below: The directory below which calls fail.
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
        """Make `call` fail with this errno (0: only late), `times` times (0: until `clear`), on paths with `named`."""
        written = self._rules / f"{call}.new"
        written.write_text(f"{number} {times} {delay_ms} {named}")
        written.rename(self._rules / call)

    def hang(self, call: str) -> None:
        """Block `call` until `clear`."""
        self.fail(call, 0, delay_ms=-1)

    def clear(self) -> None:
        """Remove all rules."""
        for rule in self._rules.iterdir():
            rule.unlink()
