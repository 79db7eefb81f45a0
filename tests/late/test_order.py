"""The late runtime's rules of order: the effect of a missing wait, and that a correct wait is enough."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.late.control import LateMachine

LAZY = pytest.mark.late("lazy")
N = 1 << 16


def numbers() -> torch.Tensor:
    """Zeros on the device, written already."""
    made = torch.zeros(N, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    return made


def pinned() -> torch.Tensor:
    return torch.full((N,), -1, dtype=torch.int32, pin_memory=True)


def stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


@LAZY
def test_kernels_wait_for_nobody_and_nobody_waits_for_them(late: LateMachine) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    torch.cuda.synchronize()
    with late.no_host_waits():
        inputs = torch.randn(5, 8, device="cuda")
        labels = torch.randint(0, 3, (5,), device="cuda")
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert late.pending() > 20
    torch.cuda.synchronize()
    assert late.pending() == 0


@pytest.mark.late("lazy", "side_lazy", "eager")
@pytest.mark.parametrize("waits", [False, True])
def test_a_stream_that_does_not_wait_reads_what_was_there_before(
    waits: bool, late: LateMachine, late_policy: str
) -> None:
    """Under `eager` even a stream that does not wait reads the right bytes."""
    live, copy, side = numbers(), numbers(), stream()
    with torch.cuda.stream(side):
        live.fill_(7)
        changed = side.record_event()
    other = stream()
    if waits:
        other.wait_event(changed)
    with torch.cuda.stream(other):
        copy.copy_(live)
    other.synchronize()
    assert copy[0].item() == (7 if waits or late_policy == "eager" else 0)


@pytest.mark.late("side_lazy", "lazy")
def test_side_lazy_does_the_work_of_the_default_stream_at_once(late: LateMachine, late_policy: str) -> None:
    numbers().fill_(7)
    assert late.pending() == (0 if late_policy == "side_lazy" else 1)


@pytest.mark.late("lazy", "side_lazy", "eager")
def test_a_copy_read_before_its_event_is_not_there(late_policy: str) -> None:
    live, host = numbers(), pinned()
    side = stream()
    with torch.cuda.stream(side):
        early = side.record_event()
        host.copy_(live, non_blocking=True)
        there = side.record_event()
    early.synchronize()
    assert host[0].item() == (0 if late_policy == "eager" else -1)
    there.synchronize()
    assert host[0].item() == 0


@LAZY
def test_an_event_brings_what_was_queued_before_it_and_no_more() -> None:
    live, host = numbers(), pinned()
    live.fill_(1)
    there = torch.cuda.current_stream().record_event()
    host.copy_(live, non_blocking=True)
    there.synchronize()
    assert host[0].item() == -1
    torch.cuda.synchronize()
    assert host[0].item() == 1


@LAZY
def test_a_copy_to_pageable_memory_waits_and_is_counted(late: LateMachine) -> None:
    live, before = numbers(), late.count("pageable_copies")
    live.fill_(3)
    waits = late.host_waits()
    assert live.cpu()[0].item() == 3
    assert late.count("pageable_copies") == before + 1
    assert late.host_waits() > waits


@LAZY
def test_pageable_memory_is_read_before_the_call_returns() -> None:
    host, live = torch.full((N,), 5, dtype=torch.int32), numbers()
    live.copy_(host, non_blocking=True)
    host.fill_(6)
    assert live[0].item() == 5


@LAZY
def test_pinned_memory_is_read_when_the_device_comes_to_it() -> None:
    host, live = pinned(), numbers()
    live.copy_(host, non_blocking=True)
    host.fill_(6)
    assert live[0].item() == 6


@LAZY
@pytest.mark.parametrize("flags", [0, 1], ids=["blocking", "non-blocking"])
def test_only_a_blocking_stream_is_ordered_with_the_default_one(flags: int) -> None:
    handle = ctypes.c_void_p()
    assert ctypes.CDLL("libcudart.so.13").cudaStreamCreateWithFlags(ctypes.byref(handle), flags) == 0
    side = torch.cuda.ExternalStream(handle.value)  # type: ignore[no-untyped-call]
    live, copy = numbers(), numbers()
    live.fill_(4)
    with torch.cuda.stream(side):
        copy.copy_(live)
    side.synchronize()
    assert copy[0].item() == (4 if flags == 0 else 0)


@LAZY
@pytest.mark.parametrize("kept", [False, True])
def test_memory_that_a_queued_kernel_reads_is_given_away_unless_it_is_recorded(kept: bool) -> None:
    """torch's allocator returns memory to its own stream at once; other streams must record that they read it."""
    torch.cuda.empty_cache()
    live, copy, side = numbers(), numbers(), stream()
    address = live.data_ptr()
    with torch.cuda.stream(side):
        copy.copy_(live)
    if kept:
        live.record_stream(side)
    del live
    again = torch.full((N,), 9, dtype=torch.int32, device="cuda")
    assert (again.data_ptr() == address) is not kept
    torch.cuda.current_stream().synchronize()
    side.synchronize()
    assert copy[0].item() == (0 if kept else 9)


@LAZY
def test_polling_an_event_comes_to_an_end() -> None:
    numbers().fill_(1)
    event = torch.cuda.current_stream().record_event()
    assert not event.query()
    assert any(event.query() for _ in range(100))
    numbers().fill_(1)
    assert not torch.cuda.current_stream().query()
    assert any(torch.cuda.current_stream().query() for _ in range(100))


@pytest.mark.late("lazy", "side_lazy", "eager", "dice:1")
def test_a_device_that_spins_is_busy_until_somebody_waits(late: LateMachine) -> None:
    live = numbers()
    torch.cuda._sleep(1000)  # type: ignore[no-untyped-call]
    live.fill_(1)
    event = torch.cuda.current_stream().record_event()
    assert not event.query()
    event.synchronize()
    assert event.query()


def _with_dice(late: LateMachine, seed: int) -> str:
    """Which of 20 copies without a wait came too early."""
    found = ""
    late.policy(f"dice:{seed}")
    for _ in range(20):
        live, copy, side = numbers(), numbers(), stream()
        live.fill_(1)
        with torch.cuda.stream(side):
            copy.copy_(live)
        side.synchronize()
        found += str(copy[0].item())
    return found


@LAZY
def test_dice_fall_one_way_and_the_other_and_again_for_the_same_seed(late: LateMachine) -> None:
    _with_dice(late, 5)  # warms up allocations, which throw dice too
    first = _with_dice(late, 5)
    assert set(first) == {"0", "1"}
    assert first == _with_dice(late, 5)
    assert first != _with_dice(late, 6)


@LAZY
def test_waits_that_spin_a_core_are_told_from_those_that_sleep(late: LateMachine) -> None:
    torch.cuda.current_stream().record_event()
    for blocking in (False, True):
        event = torch.cuda.Event(blocking=blocking)  # type: ignore[no-untyped-call]
        event.record()
        before = late.count("spinning_waits")
        event.synchronize()
        assert late.count("spinning_waits") - before == (0 if blocking else 1)


@LAZY
def test_copied_bytes_are_counted_by_stream_and_direction(late: LateMachine) -> None:
    live, copy, host, side = numbers(), numbers(), pinned(), stream()
    before, at_first = late.copied(side.cuda_stream), late.copied(0)
    with torch.cuda.stream(side):
        host.copy_(live, non_blocking=True)
        copy.copy_(live)
    after = late.copied(side.cuda_stream)
    assert after.to_host - before.to_host == after.on_device - before.on_device == 4 * N
    assert late.copied(0) == at_first


@LAZY
def test_an_index_out_of_bounds_breaks_the_device_for_good(late: LateMachine) -> None:
    live = numbers()
    live.index_select(0, torch.tensor([N], device="cuda"))
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="CUDA"):
        live.fill_(1)
    assert "index_select" in late.violations()[0]
