"""The flusher of a supervised run: kept, with its ring, while the supervisor lives; waited for in the end."""

from __future__ import annotations

import time
from pathlib import Path

from holdfast.ring.wanted import Keeper

__all__ = ["KeptFlusher"]

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
        self._keeper = Keeper(directory)
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
