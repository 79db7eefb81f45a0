"""Shared-memory files of Open MPI, listed while the job lives so that the next stager can remove leftovers.

    joined ─► which sm_segment.* does this process map? ─► mpi-segments-<pid> in the runtime directory, locked
    at the end ─► files and list are removed            a list without a lock is a dead stager's ─► the same

mpirun removes these files at the end of its job. If mpirun itself gets SIGKILL they stay, and each kill would leak some
megabytes of the on-demand node's memory. Removing a file that another process still maps does no harm: ranks attach to
each other's segments at start-up only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import stat
from pathlib import Path

from holdfast.errors import ConfigError, StoreError
from holdfast.ring.directory import open_private_file

_log = logging.getLogger("holdfast.stager.segments")

_LIST = "mpi-segments-"
_LIST_BYTES_MAX = 1 << 20
_SEGMENT = re.compile(r"sm_segment\.[\w.+-]+")
_MAPS = Path("/proc/self/maps")


def mapped_segments(maps: str) -> list[str]:
    """Find the shared-memory files of Open MPI in the text of /proc/self/maps, each once."""
    paths = (line.split(maxsplit=5)[5:] for line in maps.splitlines())
    found = (path[0] for path in paths if path and _is_segment(path[0]))
    return list(dict.fromkeys(found))


class SegmentList:
    """The list of this process. Making it removes the files that dead stagers have listed.

    Never raises: a failure leaks some memory, not a checkpoint. If a process ends without `close`, its list counts as a
    dead stager's.

    Args:
        base: The runtime directory of this machine, above the runs.
    """

    def __init__(self, base: Path) -> None:
        self._path = base / f"{_LIST}{os.getpid()}"
        self._fd, self._listed = -1, mapped_segments(_MAPS.read_text())
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in base.glob(f"{_LIST}*"):
                _clear(path)
            self._fd = open_private_file(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._fd, json.dumps(self._listed).encode())
        except (OSError, ConfigError, StoreError) as error:
            _log.warning("leftover shared memory of Open MPI cannot be removed in %s: %s", base, error)

    def close(self) -> None:
        """Remove the listed files and the list, at the end of the job; mpirun may be dead by now."""
        if self._fd >= 0:
            for name in self._listed:
                _remove(Path(name))
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._fd)
            self._fd = -1


def _clear(path: Path) -> None:
    """Remove the files that a dead stager has listed, and its list."""
    try:
        fd = open_private_file(path, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        listed = json.loads(os.read(fd, _LIST_BYTES_MAX) or b"[]")
        for name in listed if isinstance(listed, list) else ():
            if isinstance(name, str) and _is_segment(name):
                _remove(Path(name))
        path.unlink()
    except BlockingIOError:
        return  # its stager lives
    except ValueError as error:
        _log.warning("%s: expected a list of shared memory segments, so the file is removed: %s", path, error)
        path.unlink()
    finally:
        os.close(fd)


def _remove(segment: Path) -> None:
    with contextlib.suppress(OSError):
        found = segment.lstat()
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
            segment.unlink()


def _is_segment(path: str) -> bool:
    return path.startswith("/") and _SEGMENT.fullmatch(Path(path).name) is not None
