"""One peer beside holdfast: the same two trainings, the same windows, its copy compared with clones taken at the save.

The phase's name says which: `peers-dcp`. `peers-holdfast` has the small state alone, since `stall` has the large one.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.device_training import saved_by
from benchmarks.gpu.measured import Measured, Sizes
from benchmarks.gpu.peer_ways import PEERS
from benchmarks.gpu.shared import Shared, free_host_bytes
from benchmarks.gpu.stall import measure_way
from benchmarks.gpu.windows import BARE, FEW, Windows

__all__ = ["measure", "no_room", "opened"]

_ROOM = 2.4  # a peer has two slots at most, and something beside them


def measure(measured: Measured, sizes: Sizes, shared: Shared) -> None:  # noqa: ARG001 - the same for all phases
    name = measured.phase.removeprefix("peers-")
    if name == "holdfast":
        _measure_holdfast(measured, shared)
        return
    pattern = BARE if name == "torch_save" else FEW
    ways: list[dict[str, Any]] = []
    # torch.save writes the large state for so long that the small one comes first.
    for size in ("small", "large") if name == "torch_save" else ("large", "small"):
        about: dict[str, Any] = {"opened_beside_jobs": True}
        if (name, size) in shared.opened:
            windows = shared.opened.pop((name, size))
        elif reason := no_room(shared, size, measured.folder):
            measured.leave_out(size, reason)
            continue
        else:
            windows, about = opened(shared, name, size, measured.folder)
        about = {"host_bytes": windows.saver.host_bytes(), **about}
        try:
            ways.append(
                measure_way(
                    measured, windows, shared, size=size, pattern=pattern, way=about, others=tuple(ways)
                )
            )
        finally:
            windows.saver.close()
            del windows
            _give_back()
    if wrong := [way for way in ways if way["consistent"] != "yes"]:
        measured.put(torn=[f"{way['way']} {way['size']}: {way['consistent']}" for way in wrong])


def _measure_holdfast(measured: Measured, shared: Shared) -> None:
    training = shared.training("small")
    begun = time.monotonic()
    with saved_by("default", training, measured.folder) as saver:
        windows = shared.windows_of(training, saver)
        way = measure_way(measured, windows, shared, size="small", pattern=FEW, way=windows.open(begun))
    if way["consistent"] != "yes":
        raise RuntimeError(f"what was saved is not the state at the save: {way}")


def no_room(shared: Shared, size: str, folder: Path) -> str:
    """Why a peer is not opened; empty where there is room. Without it the copy would be ended by SIGBUS."""
    needed = int(_ROOM * shared.training(size).state_bytes)
    room = min(free_host_bytes(), shutil.disk_usage(folder).free)
    return f"it may take {needed} bytes of memory, and {room} are there" if room < needed else ""


def opened(shared: Shared, name: str, size: str, folder: Path) -> tuple[Windows, dict[str, Any]]:
    """A peer whose memory has been used once."""
    training = shared.training(size)
    begun = time.monotonic()
    way, _ = PEERS[name]
    windows = shared.windows_of(training, way(training, folder))
    return windows, windows.open(begun)


def _give_back() -> None:
    """Pinned memory that torch would keep: the next peer needs the room."""
    gc.collect()
    torch.cuda.empty_cache()
    with contextlib.suppress(AttributeError):  # private: it has another name in some versions
        torch._C._host_emptyCache()
