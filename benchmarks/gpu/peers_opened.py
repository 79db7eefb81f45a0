"""Memory for the peers with the large state, made and locked beside phases that time nothing: half a minute."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.measured import Measured, Sizes
from benchmarks.gpu.peer_ways import PEERS
from benchmarks.gpu.peers import no_room, opened
from benchmarks.gpu.shared import Shared

__all__ = ["measure"]

_TAIL = 300


def measure(measured: Measured, sizes: Sizes, shared: Shared) -> None:  # noqa: ARG001 - the same for all phases
    found: dict[str, Any] = {}
    measured.put(opened=found)
    for name, (_, takes_long) in PEERS.items():
        if not takes_long:
            continue
        if reason := no_room(shared, "large", shared.folder):
            measured.leave_out(name, reason)
            continue
        try:
            windows, figures = opened(shared, name, "large", shared.folder)
        except ModuleNotFoundError as error:
            measured.leave_out(name, f"no package {error.name}")
            continue
        except Exception as error:  # noqa: BLE001 - the others are opened; its own phase tries again, and says it
            measured.leave_out(name, f"{type(error).__name__}: {error}"[-_TAIL:])
            continue
        shared.opened[name, "large"] = windows
        found[name] = figures
        measured.put(opened=found)
