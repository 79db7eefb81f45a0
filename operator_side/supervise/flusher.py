"""The flusher of a supervised run: kept, with its ring, while the supervisor lives; waited for in the end."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from holdfast.ring.directory import make_private_directory
from holdfast.ring.wanted import RingKeeper

_LOOK_SECONDS = 0.05
_STATE_FIELD, _STARTED_FIELD = 0, 19  # of /proc/PID/stat, counted from behind the command's name


class KeptFlusher:
    """The stagers start it; this side knows its process by what it has written down.

    Args:
        directory: The run's runtime directory.

    Raises:
        ConfigError: The directory is not safely ours.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._keeper = RingKeeper(directory)
        self._pid, self._started = 0, ""

    def let_go(self) -> None:
        """It ends when it has done all."""
        # Before: the file with its number goes some time before the process does.
        self._pid = self._written_pid()
        self._started = _started(self._pid)
        self._keeper.close()

    def ends_within(self, seconds: float) -> bool:
        """After `let_go`: wait so long at most; whether its process is gone."""
        deadline = time.monotonic() + seconds
        while self._started and _started(self._pid) == self._started:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    @property
    def left_ring(self) -> bool:
        """A ring is there, with what the store has not taken."""
        return (self._directory / "journal").exists()

    def _written_pid(self) -> int:
        try:
            return int((self._directory / "flusher.pid").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            return 0


def _started(pid: int) -> str:
    """When this process began, as the kernel has it; empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[_STATE_FIELD] in "ZX" else fields[_STARTED_FIELD]
    except (OSError, IndexError):
        return ""


_VARIABLE = "OMPI_MCA_btl_sm_backing_directory"


class Segments:
    """Of one supervisor, named after its process.

    Args:
        ring: The run's runtime directory; the folder lies beside it.
    """

    def __init__(self, ring: Path) -> None:
        self._stem = f"{ring.name}-mpi-"
        self._folder = ring.with_name(f"{self._stem}{os.getpid()}")

    def make(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Make the folder, and say so in the environment of a job; what supervisors that are gone have left is removed.

        An environment that has a place for these files already is left as it is.

        Raises:
            ConfigError: The folder is not safely ours.
        """
        if _VARIABLE in environment:
            return dict(environment)
        for left in self._folder.parent.glob(f"{self._stem}*"):
            number = left.name.removeprefix(self._stem)
            if number.isdigit() and not _lives(int(number)):
                shutil.rmtree(left, ignore_errors=True)
        make_private_directory(self._folder)
        return {**environment, _VARIABLE: str(self._folder)}

    def remove(self) -> None:
        """Take the folder away, if it was made. The job has ended."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's
    return True
