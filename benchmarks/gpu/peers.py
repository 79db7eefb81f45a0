"""holdfast's peers one by one: the same training, the same windows, the copy compared with clones taken at the save.

The phase's name gives the peer: `peers-dcp`. These use the small state; `peers-holdfast` measures holdfast in the same
run. `peers-large` uses the large state, for as many peers as time allows; `stall` measures holdfast with it.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
import time
from typing import Any

import torch

from benchmarks.gpu.device_training import saved_by
from benchmarks.gpu.measured import QUICK, Measured, Sizes
from benchmarks.gpu.packages import find_peers
from benchmarks.gpu.peer_ways import PEERS
from benchmarks.gpu.shared import Shared, free_host_bytes
from benchmarks.gpu.stall import measure_way
from benchmarks.gpu.windows import BARE, FEW

__all__ = ["measure"]

_ROOM = 2.4  # a peer has at most two slots, and some other memory
_LOCKED_BYTES_PER_SECOND = 1.4e9
_WINDOWS_SECONDS = 5.0
# Peer ─► copies of the state that it locks; from the cheapest to the most expensive.
_LARGE = {"torch_checkpointing": 1, "dcp": 1, "lm_resiliency": 2}
_TAIL = 300


def measure(measured: Measured, sizes: Sizes, shared: Shared) -> None:
    shared.close()
    find_peers()
    name = measured.phase.removeprefix("peers-")
    if name == "holdfast":
        _measure_holdfast(measured, shared)
    elif name == "large":
        _measure_large(measured, sizes, shared)
    else:
        _told(measured, [_way(measured, shared, name, "small")])


def _measure_large(measured: Measured, sizes: Sizes, shared: Shared) -> None:
    ways: list[dict[str, Any]] = []
    measured.put(ways=ways)
    for name, copies in _LARGE.items():
        needed = copies * shared.training("large").state_bytes / _LOCKED_BYTES_PER_SECOND + _WINDOWS_SECONDS
        if sizes != QUICK and measured.seconds_left() < needed:
            measured.leave_out(name, f"{measured.seconds_left():.0f} s were left, and it takes {needed:.0f}")
            continue
        try:
            ways.append(_way(measured, shared, name, "large", tuple(ways)))
        except ModuleNotFoundError as error:
            measured.leave_out(name, f"no package {error.name}")
        except Exception as error:  # noqa: BLE001 - the others are measured all the same
            measured.leave_out(name, f"{type(error).__name__}: {error}"[-_TAIL:])
    _told(measured, ways)


def _way(
    measured: Measured, shared: Shared, name: str, size: str, others: tuple[dict[str, Any], ...] = ()
) -> dict[str, Any]:
    """Measure a peer, then free its memory for the next one."""
    try:
        return _opened(measured, shared, name, size, others)
    finally:
        gc.collect()
        torch.cuda.empty_cache()
        with contextlib.suppress(AttributeError):  # private: named differently in some versions
            torch._C._host_emptyCache()


def _opened(
    measured: Measured, shared: Shared, name: str, size: str, others: tuple[dict[str, Any], ...]
) -> dict[str, Any]:
    training = shared.training(size)
    needed = int(_ROOM * training.state_bytes)
    room = min(free_host_bytes(), shutil.disk_usage(measured.folder).free)
    if room < needed:  # without room the copy would end in SIGBUS
        raise RuntimeError(f"it may take {needed} bytes of memory, and {room} are there")
    begun = time.monotonic()
    saver = PEERS[name](training, measured.folder)
    try:
        windows = shared.windows_of(training, saver)
        about = {"way": name, **windows.open(begun)}
        pattern = BARE if saver.blocks else FEW
        return measure_way(measured, windows, shared, size=size, pattern=pattern, way=about, others=others)
    finally:
        saver.close()


def _told(measured: Measured, ways: list[dict[str, Any]]) -> None:
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
