"""Functions on the current process for stager, flusher and ranks: priority, memory, waiting for descriptors, exit."""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


def yield_to_training(niceness: int) -> None:
    """Raise the niceness of this process and later children to `niceness` (0 to 19; 0: unchanged). Any thread."""
    adjusted: set[int] = set()
    # Niceness is per thread, and a thread with the old value may start another meanwhile: repeat until all have it.
    while left := {int(task.name) for task in Path("/proc/self/task").iterdir()} - adjusted:
        for thread in left:
            with suppress(ProcessLookupError):  # the thread has ended
                before = os.getpriority(os.PRIO_PROCESS, thread)
                os.setpriority(os.PRIO_PROCESS, thread, max(niceness, before))
        adjusted |= left


def at_exit(call: Callable[..., object], *arguments: object) -> Callable[[], None]:
    """Like `atexit.register`, but skipped in forked children, which inherit the list. Returns the unregister call."""
    process = os.getpid()

    def in_this_process() -> None:
        if os.getpid() == process:
            call(*arguments)

    atexit.register(in_this_process)
    return lambda: atexit.unregister(in_this_process)


# Signals that end a process of holdfast in order. SIGHUP is one, so that a closing terminal does not kill a job midway;
# under `nohup` it is ignored from the start, and stays ignored.
ENDING_SIGNALS = tuple(
    number
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
)
_PR_SET_PDEATHSIG = 1


def set_parent_death_signal(number: int = signal.SIGKILL) -> None:
    """Have the kernel send signal `number` to this process when its parent dies. Survives exec, not fork."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def boot_id() -> str:
    """Return the kernel's random id of this boot; empty if the system has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


class ProcessStat(NamedTuple):
    """Fields of /proc/PID/stat of a process that has not ended."""

    parent: int
    session: int
    started: int  # ticks since boot; tells two processes with the same id apart


def process_stat(pid: int) -> ProcessStat | None:
    """Return None for a process that has ended or is a zombie."""
    try:
        # The command's name may have spaces and parentheses, so count fields after the last parenthesis.
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else ProcessStat(int(fields[1]), int(fields[3]), int(fields[19]))


def running_processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def parent_of(pid: int) -> int:
    """Return the parent of process `pid`; 0 if `pid` has ended."""
    stat = process_stat(pid)
    return stat.parent if stat else 0


def wait_readable(descriptors: Iterable[int], seconds: float | None) -> None:
    """Sleep until a descriptor is readable, at most `seconds`. Unlike `select`, takes any above 1023. Any thread."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    poll.poll(None if seconds is None else math.ceil(max(0.0, seconds) * 1000))


FINALIZE_SECONDS_MAX = (
    30.0  # MPI_Finalize takes milliseconds; some seconds where many processes share few cores
)


def call_or_exit(seconds_max: float, call: Callable[[], object], what: str, *, code: int = 0) -> None:
    """Call `call`; after `seconds_max`, report on stderr and end the process with `code`. Main thread, at exit.

    `call` must release the GIL: mpi4py's `MPI.Finalize` does not, the same function called by ctypes does.
    """

    def exit_now() -> None:
        sys.stderr.write(
            f"holdfast: {what} did not return within {seconds_max:g} s: a process of this job must have died in it; "
            "nothing is lost, this process exits\n"
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    timer = threading.Timer(seconds_max, exit_now)
    timer.daemon = True
    timer.start()
    try:
        call()
    finally:
        timer.cancel()


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return the memory available without swapping, within the limits of this process's control groups."""
    rows = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    least = next(int(row[1]) for row in rows if row[0] == "MemAvailable:") * 1024
    for folder in _memory_groups(root):
        least = min(least, _available_bytes(folder, least))
    return max(0, least)


def count_oom_kills(root: Path = Path("/")) -> int:
    """Count processes that the kernel killed to free memory, in this control group, else on this machine; else 0."""
    counters = [
        folder / name
        for folder in _memory_groups(root)
        for name in ("memory.events", "memory.oom_control")  # cgroups version 2, version 1
    ]
    for counter in (*counters, root / "proc/vmstat"):
        with suppress(OSError, ValueError):
            for line in counter.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def _memory_groups(root: Path) -> Iterator[Path]:
    """Yield the folders of control groups that limit this process's memory, innermost first; they may not exist."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
        elif not controllers:
            top = root / "sys/fs/cgroup"
        else:
            continue
        group = top / name.strip().lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top))


def _available_bytes(group: Path, otherwise: int) -> int:
    """Return the memory left below a control group's limit, page cache included; `otherwise` if it has no limit."""
    for limit, usage, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
    ):
        with suppress(OSError, ValueError):  # the limit is "max", or the file does not exist
            used = int((group / usage).read_text())
            rows = (line.split() for line in (group / "memory.stat").read_text().splitlines())
            cache = sum(int(row[1]) for row in rows if row[0] == cached)
            return int((group / limit).read_text()) - used + cache
    return otherwise
