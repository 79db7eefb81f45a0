"""Describes the machine of the figures: card, driver, torch, commit, and its limits."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.measured import Measured, Sizes
from benchmarks.gpu.shared import Shared

__all__ = ["measure", "of_the_driver"]

_ROOT = Path(__file__).resolve().parents[2]
_ASK_SECONDS_MAX = 10
_CARD = (
    "driver_version",
    "pcie.link.gen.current",
    "pcie.link.width.current",
    "power.limit",
    "mig.mode.current",
)
_WANTED = ("pydantic_settings", "isal", "pytest", "triton")


def measure(measured: Measured, sizes: Sizes, shared: Shared) -> None:  # noqa: ARG001 - the same for all phases
    card = torch.cuda.get_device_properties(0)
    measured.put(
        card=card.name,
        devices=torch.cuda.device_count(),
        capability=f"{card.major}.{card.minor}",
        device_bytes=card.total_memory,
        torch=torch.__version__,
        cuda=torch.version.cuda or torch.version.hip,
        commit=_commit(),
        python=platform.python_version(),
        kernel=platform.release(),
        cores=os.cpu_count(),
        host_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        locked_bytes_max=_limit(resource.RLIMIT_MEMLOCK),
        shared_memory_bytes=shutil.disk_usage("/dev/shm").total,
        lacks=[name for name in _WANTED if importlib.util.find_spec(name) is None],
    )
    measured.put(**of_the_driver())
    torch.zeros(1, device="cuda").cpu()  # fails here, once, instead of in each phase
    measured.put(works=True)


def _commit() -> str:
    """Return the commit; HOLDFAST_COMMIT names it for a copied tree, whose git history differs or is missing."""
    said = _said(["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"])
    return os.environ.get("HOLDFAST_COMMIT", "") or said or "unknown"


def of_the_driver() -> dict[str, Any]:
    """Return nvidia-smi's facts about the first card; without `driver` if its output cannot be parsed."""
    said = _said(["nvidia-smi", "--id=0", f"--query-gpu={','.join(_CARD)}", "--format=csv,noheader"])
    values = [value.strip() for value in said.split(",")]
    if len(values) != len(_CARD):
        return {"driver": None}
    driver, *others = values
    return {"driver": driver, **dict(zip(_CARD[1:], others, strict=True))}


def _said(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASK_SECONDS_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _limit(of: int) -> int | None:
    soft, _ = resource.getrlimit(of)
    return None if soft == resource.RLIM_INFINITY else soft
