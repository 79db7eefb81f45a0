"""The flusher of a supervised run: the supervisor keeps its ring open while it lives, and waits for it at the end."""

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

_POLL_SECONDS = 0.05


class KeptFlusher:
    """The flusher that a stager started, found by pid file. Raises `ConfigError`: others may write to the directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._keeper = RingKeeper(directory)
        self._pid, self._started = 0, start_ticks(0)

    def release(self) -> None:
        """Let the flusher exit once it has written everything."""
        # Read the process id first: the flusher removes its pid file before it exits.
        self._pid = self._read_pid()
        self._started = start_ticks(self._pid)
        self._keeper.close()

    def wait_for_exit(self, seconds: float) -> bool:
        """After `release`: wait up to `seconds` for the process to exit. Return whether it has."""
        deadline = time.monotonic() + seconds
        while self._started and start_ticks(self._pid) == self._started:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    @property
    def has_leftover_ring(self) -> bool:
        """Whether the ring still holds checkpoints that are not in the store."""
        return (self._directory / "journal").exists()

    def _read_pid(self) -> int:
        try:
            return int((self._directory / "flusher.pid").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            return 0


_VARIABLE = "OMPI_MCA_btl_sm_backing_directory"


class SegmentFolder:
    """Folder beside `ring`, named by the supervisor's pid, for the shared-memory segments of its MPI jobs."""

    def __init__(self, ring: Path) -> None:
        self._stem = f"{ring.name}-mpi-"
        self._folder = ring.with_name(f"{self._stem}{os.getpid()}")

    def prepare(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Create the folder and add it to a job's environment, unless one is set; remove those of dead supervisors."""
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
