"""The folder where MPI keeps its shared-memory files while a job of this supervisor runs on this machine.

A killed rank leaves its file behind; in a folder of ours it can be taken away, by this supervisor or, if that was
killed as well, by the next one of the run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from holdfast.ring.directory import make_private_directory

__all__ = ["Segments"]

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
