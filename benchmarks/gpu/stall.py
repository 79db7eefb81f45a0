"""Measures the cost of saving the large state to the training, and the time until it is kept and until it is restored.

The order: make and lock memory; windows (windows.py); an observed save; a save that is restored and compared.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.gpu.measured import Measured, Sizes
from benchmarks.gpu.shared import Shared
from benchmarks.gpu.windows import MANY, Windows

__all__ = ["measure", "measure_way"]

_REST = 0.35  # share of the time left that the steps after the windows need


def measure(measured: Measured, sizes: Sizes, shared: Shared) -> None:  # noqa: ARG001 - the same for all phases
    measured.put(bare_gb_per_second=shared.rates())
    training = shared.training("large")
    measured.put(state_bytes=training.state_bytes, layers=training.layers)
    windows = shared.windows()
    measured.put(**shared.opening)
    way = measure_way(measured, windows, shared, size="large", pattern=MANY, way={**shared.opening})
    stats = windows.saver.checkpointer.stats  # type: ignore[attr-defined]
    measured.put(causes=dict(stats.causes), failed=stats.failed)
    if way["consistent"] != "yes":
        raise RuntimeError(f"what was saved is not the state at the save: {way}")


def measure_way(
    measured: Measured,
    windows: Windows,
    shared: Shared,
    *,
    size: str,
    pattern: str,
    way: dict[str, Any],
    others: tuple[dict[str, Any], ...] = (),
) -> dict[str, Any]:
    """Measure one way at one size; write figures under `ways` as they come, and return all.

    Args:
        measured: Receives the figures.
        windows: Windows of this way.
        shared: Provides the rates of bare copies.
        size, pattern: Name of the size, and order of the windows.
        way: Figures known so far.
        others: Ways measured earlier in this phase.
    """
    rates, nbytes = shared.rates(), windows.training.state_bytes
    way = {"way": measured.phase.removeprefix("peers-"), "size": size, "state_bytes": nbytes, **way}
    if measured.phase == "stall":
        way["way"] = "holdfast"
    way["keeps"] = windows.saver.keeps
    way["device_copy_ms"] = round(nbytes / rates["on_device"] / 1e6, 3)
    way["consistent"] = "not looked at"

    def put(**figures: Any) -> None:
        way.update(figures)
        measured.put(ways=[*others, way])

    put()
    whole = windows.measure(pattern, time.monotonic() + (1 - _REST) * measured.seconds_left())
    put(cut_short=not whole, **windows.figures())
    if not windows.saver.blocks:
        kept = windows.kept()
        if kept["copy_seconds"]:
            kept["copy_of_bare"] = round(kept["copy_seconds"] * rates["pinned"] * 1e9 / nbytes, 4)
        put(**kept)
    compared = windows.compared()
    if windows.saver.blocks:
        call = compared["compared_call_ms"]
        put(saves=1, call_ms=call, stall_ms=call, stall_ms_per_gb=round(call / (nbytes / 1e9), 4))
    if "read_back_seconds" in compared:
        compared["read_back_of_bare"] = round(
            compared["read_back_seconds"] * rates["to_device"] * 1e9 / nbytes, 4
        )
    put(**compared)
    return way
