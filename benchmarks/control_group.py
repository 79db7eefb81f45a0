"""A control group that limits CPUs and memory of a process started in it, and of its children.

    with ControlGroup() as group:   group.allow(cpus=0.5, memory_bytes=1 << 30)   [*group.inside, "program", …]

Supports only control groups of version 1, where `cpu` and `memory` have a tree each. Needs root.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path

__all__ = ["ControlGroup", "why_not"]

_CONTROLLERS = ("cpu", "memory")
_PERIOD_MICROSECONDS = 100_000
_EMPTY_SECONDS_MAX = 10.0
_NUMBERS = itertools.count()
# The shell joins the group, then execs the program.
_ENTER = 'until test "$1" = --; do echo $$ > "$1/cgroup.procs" || exit; shift; done; shift; exec "$@"'


def why_not() -> str:
    """Return why this process cannot make a control group, or ""."""
    if os.geteuid() != 0:
        return "a control group is made by root"
    missing = [name for name in _CONTROLLERS if not (_tree(name) / "cgroup.procs").exists()]
    return f"control groups of version 1 have no {' and no '.join(missing)} here" if missing else ""


class ControlGroup:
    """A context manager: removes the group at its end, by when its processes must have ended.

    Attributes:
        inside: Prefix of a command that is to run in the group.
    """

    def __init__(self) -> None:
        name = f"holdfast-bench-{os.getpid()}-{next(_NUMBERS)}"
        self._folders = {controller: _tree(controller) / name for controller in _CONTROLLERS}
        for folder in self._folders.values():
            folder.mkdir()
        self.inside = ("sh", "-c", _ENTER, "sh", *map(str, self._folders.values()), "--")

    def allow(self, *, cpus: float, memory_bytes: int) -> None:
        """Set the limits; `cpus` may be less than one."""
        self._set("cpu", "cpu.cfs_period_us", _PERIOD_MICROSECONDS)
        self._set("cpu", "cpu.cfs_quota_us", round(cpus * _PERIOD_MICROSECONDS))
        self._set("memory", "memory.limit_in_bytes", memory_bytes)

    @property
    def most_bytes(self) -> int:
        """Peak memory of the group, pages of files included."""
        return int((self._folders["memory"] / "memory.max_usage_in_bytes").read_text())

    def _set(self, controller: str, name: str, value: int) -> None:
        (self._folders[controller] / name).write_text(str(value))

    def __enter__(self) -> ControlGroup:
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + _EMPTY_SECONDS_MAX
        for folder in self._folders.values():
            while True:
                with contextlib.suppress(OSError):  # a process that has ended is still leaving
                    folder.rmdir()
                if not folder.exists():
                    break
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{folder} is not empty: a process in it goes on")
                time.sleep(0.05)


def _tree(controller: str) -> Path:
    """This process's group in that tree; a group made below it inherits its limits."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, place = line.split(":", 2)
        if controller in names.split(","):
            return Path("/sys/fs/cgroup") / controller / place.lstrip("/")
    return Path("/sys/fs/cgroup") / controller
