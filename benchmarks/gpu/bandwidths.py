"""Copies from the device to the host: bare ones, and those of holdfast's lane without tiers and threads.

bare pinned, holdfast's own locked memory, pageable, device to device     one large tensor
memory of a mirror: allocated on the device, and freed                    one section
lane: 30 large tensors, many small ones    mirror (through a copy on the device) and gate (from live tensors)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.measured import Measured, Sizes
from benchmarks.gpu.shared import Shared, gb_per_second
from holdfast.wire.state_messages import Agreement
from trainer_side.save.copy_plan import Router, SlicePlan
from trainer_side.save.device_stream import free_storage, stream_of
from trainer_side.save.host_memory import locked_buffer
from trainer_side.save.staging import CopyEngine, Staging
from trainer_side.state.skeleton import capture, plan
from trainer_side.state.tensor_table import table
from trainer_side.state.tree import classify, collect
from trainer_side.tiers.first_touch import huge_buffer

__all__ = ["measure"]

_LARGE_TENSORS = 30
_PAGE_BYTES = 4096
_CHUNK_BYTES = 16 << 20
_WARM_UP = 2
_STRATEGIES = {"mirror": 1 << 40, "gate": 0}  # device_bytes_max


def measure(measured: Measured, sizes: Sizes, shared: Shared) -> None:
    bare = dict(shared.rates())
    measured.put(bare_gb_per_second=bare)
    live = torch.ones(sizes.copy_bytes, dtype=torch.uint8, device="cuda")
    for name, make in (("holdfast_locked", locked_buffer), ("pageable", huge_buffer)):
        bare[name] = gb_per_second(make(sizes.copy_bytes), live, sizes.rounds)
        measured.put(bare_gb_per_second=bare)
    del live
    measured.put(mirror_memory=_mirror_memory(sizes))
    lane: dict[str, dict[str, float]] = {}
    for state, count, nbytes in (
        ("large", _LARGE_TENSORS, sizes.large_bytes),
        ("small", sizes.small_tensors, sizes.small_bytes),
    ):
        for strategy, device_bytes_max in _STRATEGIES.items():
            copier = _LaneAlone(count, nbytes, device_bytes_max)
            speed = _lane_gb_per_second(sizes, copier.nbytes, copier.copy)
            lane[f"{state}_{strategy}"] = {
                "tensors": count,
                "bytes": copier.nbytes,
                "gb_per_second": speed,
                "of_bare_pinned": round(speed / bare["pinned"], 4),
                "save_call_ms": round(1e3 * statistics.median(copier.call_seconds[_WARM_UP:]), 4),
            }
            assert copier.is_mirrored is bool(device_bytes_max), f"{strategy}: another way was taken"
            measured.put(lane=lane)
            del copier
            torch.cuda.empty_cache()


def _mirror_memory(sizes: Sizes) -> dict[str, float]:
    """Time the allocation and release of a mirror's memory, which each save with a mirror pays for."""
    lane = stream_of(torch.device("cuda", torch.cuda.current_device()))
    taken, given_back = [], []
    for _ in range(_WARM_UP + sizes.rounds):
        begun = time.perf_counter()
        memory = lane.allocate(sizes.copy_bytes)
        taken.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        free_storage(memory)
        given_back.append(time.perf_counter() - begun)
    return {
        f"{name}_ms_per_gb": round(1e3 * statistics.median(seconds[_WARM_UP:]) / (sizes.copy_bytes / 1e9), 4)
        for name, seconds in (("take", taken), ("give_back", given_back))
    }


def _lane_gb_per_second(sizes: Sizes, nbytes: int, copy: Callable[[], object]) -> float:
    """Return the median round's rate."""
    seconds = []
    for _ in range(_WARM_UP + sizes.rounds):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return round(nbytes / statistics.median(seconds[_WARM_UP:]) / 1e9, 4)


class _LaneAlone:
    """Parameters on the device, and the lane that copies them to a staging area."""

    def __init__(self, count: int, nbytes: int, device_bytes_max: int) -> None:
        numbers = max(1, nbytes // count // 4)
        model = torch.nn.ParameterList(torch.ones(numbers, device="cuda") for _ in range(count))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        tree = collect(state)
        pickle_bytes = table(state, tree, rank=0, ranks=1).pickle_bytes
        skeleton = plan(
            tree,
            classify(state, tree),
            rank=0,
            ranks=1,
            chunk_bytes=_CHUNK_BYTES,
            agreed=Agreement(-(-pickle_bytes // _PAGE_BYTES) * _PAGE_BYTES, {}),
        )
        taken = capture(tree, skeleton)
        assert taken is not None
        self._taken, slice_plan = taken, SlicePlan.of(skeleton.layout, 0, skeleton.gated)
        self._router = Router(slice_plan)
        self._staging = Staging(
            skeleton, slice_plan, CopyEngine(device_bytes_max=device_bytes_max), pinned=True
        )
        self.nbytes = numbers * 4 * count
        self.is_mirrored = False
        self.call_seconds: list[float] = []

    def copy(self) -> None:
        """Do the work of `save()`, then that of the copy thread."""
        begun = time.perf_counter()
        sources, contents = self._taken.sources, self._taken.contents
        route = self._router.route(sources, dict, order_changed=not self.call_seconds)
        self.is_mirrored = self._staging.copy_now(sources, contents, route)
        after: torch.cuda.Event = torch.cuda.current_stream().record_event()
        self.call_seconds.append(time.perf_counter() - begun)
        self._staging.copy_gated(
            sources,
            route,
            after=after,
            cancelled=lambda: False,
            release=lambda _: None,
            on_all_read=lambda: None,
        )
