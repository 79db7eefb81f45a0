"""Copies from a CUDA device: the bytes are those at `save()`, and only the copy thread waits for the device."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch

from holdfast.wire.state_messages import Agreement
from trainer_side.save.copy_plan import Router, SlicePlan
from trainer_side.save.staging import CopyEngine, Staging
from trainer_side.state.rng import RngState
from trainer_side.state.skeleton import Capture, Skeleton, capture, plan
from trainer_side.state.tensor_table import table
from trainer_side.state.tree import classify, collect

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]
PLENTY = 1 << 30
_PAGES_BYTES = 4 << 20  # the driver may take a few of its own
STRATEGIES = pytest.mark.parametrize("device_bytes_max", [0, PLENTY], ids=["C", "mirror"])


class OnDevice:
    """A model with large layers, many small ones, buffers and moments on the device, counters in host memory."""

    def __init__(self, device_bytes_max: int | None) -> None:
        torch.manual_seed(0)
        small = [torch.nn.Linear(8, 8) for _ in range(300)]
        self.model = torch.nn.Sequential(
            torch.nn.Linear(2048, 2048), torch.nn.BatchNorm1d(2048), *small
        ).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=False)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        tree = collect(self.state)
        proposed = table(self.state, tree, rank=0, ranks=1)
        self.skeleton: Skeleton = plan(
            tree,
            classify(self.state, tree),
            rank=0,
            ranks=1,
            chunk_bytes=1 << 20,
            agreed=Agreement(-(-proposed.pickle_bytes // 4096) * 4096, {}),
        )
        taken = capture(tree, self.skeleton)
        assert taken is not None
        self.taken: Capture = taken
        self.slice_plan = SlicePlan.of(self.skeleton.layout, 0, self.skeleton.gated)
        self.engine = CopyEngine(device_bytes_max=device_bytes_max)
        self.staging = Staging(self.skeleton, self.slice_plan, self.engine, pinned=True)
        self.router = Router(self.slice_plan)
        self.passed: list[int] = []
        self.is_mirrored = False
        self.expected: list[bytes | None] = []

    def save(self) -> torch.cuda.Event:
        torch.cuda.synchronize()
        sources = self.taken.sources
        self.expected = [None if one is None else bytes(one.bytes().cpu().numpy()) for one in sources]
        route = self.router.route(self.taken.sources, dict, order_changed=True)
        assert route.device
        self.is_mirrored = self.staging.copy_now(sources, self.taken.contents, route)
        after: torch.cuda.Event = torch.cuda.current_stream().record_event()
        return after

    def copy(self, after: torch.cuda.Event, *, copied: Any = lambda: None) -> None:
        route = self.router.route(self.taken.sources, dict, order_changed=False)
        live = self.staging.live_route(route)

        def passed(storages: Collection[int]) -> None:
            self.passed.extend(storages)

        self.staging.copy_gated(
            self.taken.sources,
            route,
            after=after,
            cancelled=lambda: False,
            release=passed,
            on_all_read=copied,
        )
        assert set(self.passed) == live.storages

    def check(self) -> None:
        layout = self.skeleton.layout
        assert self.staging.nbytes == layout.image_bytes
        for chunk, _ in layout.sent_frames(0):
            assert self.staging.is_ready(layout.chunk_extent(chunk).offset)
        for index, (entry, want) in enumerate(zip(layout.entries, self.expected, strict=True)):
            got = bytes(self.staging.view(entry.offset, entry.nbytes))
            assert got == (self.taken.contents[index] if want is None else want), entry.name

    def overwrite(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1)
            for value in self.optimizer.state.values():
                value["exp_avg"].add_(1)


@STRATEGIES
def test_the_slice_of_a_model_on_the_device_is_copied_behind_the_gate(device_bytes_max: int | None) -> None:
    job = OnDevice(device_bytes_max)
    for _ in range(2):
        job.passed.clear()
        job.copy(job.save())
        job.check()
        job.overwrite()


@STRATEGIES
def test_with_a_mirror_any_change_after_save_comes_behind_it(device_bytes_max: int | None) -> None:
    """The mirror's copy is ordered by the device's own stream: no gate, and no thread waits."""
    job = OnDevice(device_bytes_max)
    after = job.save()
    assert job.is_mirrored is bool(device_bytes_max)
    if job.is_mirrored:
        job.overwrite()
    job.copy(after)
    job.check()


def test_the_memory_of_a_mirror_stays_with_torch_and_goes_back_when_somebody_wants_it() -> None:
    job = OnDevice(PLENTY)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    for number in range(3):
        allocated, before = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
        after = job.save()
        assert torch.cuda.memory_allocated() - allocated > job.slice_plan.nbytes // 2
        assert number == 0 or before - torch.cuda.mem_get_info()[0] < _PAGES_BYTES
        job.copy(after)
        assert torch.cuda.memory_allocated() == allocated
    torch.cuda.empty_cache()
    assert free - torch.cuda.mem_get_info()[0] < _PAGES_BYTES


@STRATEGIES
def test_updates_after_the_gate_opens_are_not_in_the_copy(device_bytes_max: int | None) -> None:
    """The optimizer runs on the training's own stream as soon as the gate opens."""
    job = OnDevice(device_bytes_max)
    other = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def update() -> None:
        # With a gate the device has read everything; a mirror is ordered with the stream on which save() was called.
        with torch.cuda.stream(torch.cuda.current_stream() if job.is_mirrored else other):
            job.overwrite()

    job.copy(job.save(), copied=update)
    torch.cuda.synchronize()
    job.check()


def test_save_does_not_wait_for_work_that_is_queued() -> None:
    job = OnDevice(0)
    job.save()
    torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]  # cycles: half a second
    queued: torch.cuda.Event = torch.cuda.current_stream().record_event()
    job.staging.copy_now(job.taken.sources, job.taken.contents)
    there = queued.query()  # type: ignore[no-untyped-call]
    assert not there, "either it waited, or this device is too fast for the test"
    torch.cuda.synchronize()


def test_buffers_are_those_of_the_moment_of_save() -> None:
    job = OnDevice(0)
    after = job.save()
    job.model[1].running_mean.fill_(7)  # type: ignore[operator]
    job.copy(after)
    job.check()


def test_random_numbers_of_the_device_go_on_where_they_were() -> None:
    state = RngState()
    torch.cuda.manual_seed_all(5)
    saved = state.state_dict()
    first = torch.randn(7, device="cuda")
    state.load_state_dict(saved)
    assert torch.randn(7, device="cuda").equal(first)
