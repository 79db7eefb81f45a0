"""Identifies a writer by process and machine, so that others can check whether it is alive."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.process import boot_id, process_stat


@dataclass(frozen=True, slots=True)
class Identity:
    """The process and the machine of a writer."""

    host: str
    boot_id: str
    pid_namespace: str  # pids are unique only within it: containers of one machine share host and boot
    pid: int
    started: int  # start time in ticks since boot, 0 where it is unknown

    @classmethod
    def of_this_process(cls) -> Identity:
        pid, namespace = os.getpid(), ""
        with suppress(OSError):
            namespace = str(Path("/proc/self/ns/pid").readlink())
        return cls(
            host=platform.node(),
            boot_id=boot_id(),
            pid_namespace=namespace,
            pid=pid,
            started=start_ticks(pid) or 0,
        )

    def shares_pid_namespace(self, other: Identity) -> bool:
        """Whether the other's pid can be looked up here."""
        mine = (self.host, self.boot_id, self.pid_namespace)
        return bool(self.boot_id) and mine == (other.host, other.boot_id, other.pid_namespace)

    def is_running(self) -> bool:
        """Whether this very process is running. Only meaningful in the same place."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except (PermissionError, OverflowError):
            pass  # another user's process, or not a pid; the start time below decides
        started = start_ticks(self.pid)
        return started is not None and (started == self.started or not self.started)


def start_ticks(pid: int) -> int | None:
    """Return a process's start time in ticks since boot; 0: the system does not tell; None: no such process."""
    if not Path("/proc/self/stat").exists():
        return 0
    stat = process_stat(pid)
    return stat.started if stat else None
