"""The flusher of a supervised run: kept with its ring while the supervisor lives, and waited for at the end."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from holdfast.checkpoints.identity import start_ticks
from holdfast.process import process_stat
from holdfast.ring.directory import make_private_directory
from holdfast.ring.ring_keeper import RingKeeper

_LOOK_SECONDS = 0.05


class KeptFlusher:
    """The flusher that a stager started, by its pid file. Raises `ConfigError`: others may write to the directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._keeper = RingKeeper(directory)
        self._pid, self._started = 0, start_ticks(0)

    def let_go(self) -> None:
        """Let the flusher end when it has written everything."""
        # Read the id first: the pid file goes some time before the process does.
        self._pid = self._written_pid()
        self._started = start_ticks(self._pid)
        self._keeper.close()

    def ends_within(self, seconds: float) -> bool:
        """After `let_go`: wait for the end of the process, at most this long. Returns whether it has ended."""
        deadline = time.monotonic() + seconds
        while self._started and start_ticks(self._pid) == self._started:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    @property
    def left_ring(self) -> bool:
        """Whether there is a ring with checkpoints that are not in the store."""
        return (self._directory / "journal").exists()

    def _written_pid(self) -> int:
        try:
            return int((self._directory / "flusher.pid").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            return 0


_VARIABLE = "OMPI_MCA_btl_sm_backing_directory"


class Segments:
    """The folder, beside `ring`, for the shared-memory segments of one supervisor's MPI jobs; its pid names it."""

    def __init__(self, ring: Path) -> None:
        self._stem = f"{ring.name}-mpi-"
        self._folder = ring.with_name(f"{self._stem}{os.getpid()}")

    def make(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Make the folder and name it in a job's environment, unless one is named; remove those of dead supervisors."""
        if _VARIABLE in environment:
            return dict(environment)
        for left in self._folder.parent.glob(f"{self._stem}*"):
            number = left.name.removeprefix(self._stem)
            if number.isdigit() and process_stat(int(number)) is None:
                shutil.rmtree(left, ignore_errors=True)
        make_private_directory(self._folder)
        return {**environment, _VARIABLE: str(self._folder)}

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
