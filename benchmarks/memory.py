"""Memory and CPU time of processes, read from the kernel.

RSS counts every resident page, shared ones included. USS counts only a process's own pages: the ring, which stager and
flusher both map, is in neither one's USS, so tables state it once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Footprint", "footprint", "idle_cpu_percent", "peak_bytes", "reset_peak", "resident_bytes"]


@dataclass(frozen=True)
class Footprint:
    """Memory of one process, in bytes."""

    rss_bytes: int
    uss_bytes: int


def footprint(pid: int) -> Footprint:
    """Return the memory of process `pid` now."""
    information = psutil.Process(pid).memory_full_info()
    return Footprint(information.rss, information.uss)


def resident_bytes(*, children: bool = True) -> int:
    """RSS of this process plus the USS of its child processes: a writer process counts too."""
    me = psutil.Process()
    total = int(me.memory_info().rss)
    if children:
        total += sum(int(child.memory_full_info().uss) for child in me.children(recursive=True))
    return total


def reset_peak() -> bool:
    """Reset the kernel's record of this process's peak RSS; False where the kernel does not allow that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_bytes(pid: int | None = None) -> int:
    """Peak RSS of this process since `reset_peak`, or of process `pid` since its start."""
    for line in Path(f"/proc/{pid or 'self'}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def idle_cpu_percent(pids: Mapping[str, int], seconds: float) -> dict[str, float]:
    """CPU time of each process over `seconds` without work, in percent of one core."""

    def used(pid: int) -> float:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)

    before = {name: used(pid) for name, pid in pids.items()}
    begin = time.monotonic()
    time.sleep(seconds)
    after = {name: used(pid) for name, pid in pids.items()}
    elapsed = time.monotonic() - begin
    return {name: 100 * (after[name] - before[name]) / elapsed for name in pids}
