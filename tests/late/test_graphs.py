"""The late runtime's rules of captured graphs: which work a replay repeats, which calls end a capture."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from tests.late.control import LateMachine

pytestmark = pytest.mark.late("lazy")


def stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def in_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_a_replay_does_all_again_and_drawing_goes_on(late: LateMachine) -> None:
    total, one = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total += one
        drawn = torch.randn(4, device="cuda")
    assert total.tolist() == [0, 0, 0, 0], "a capture does nothing yet"
    seen = set()
    for number in range(1, 4):
        graph.replay()
        assert total.tolist() == [number] * 4
        seen.add(tuple(drawn.tolist()))
    assert len(seen) == 3


def test_a_replay_is_queued_as_any_work_is(late: LateMachine) -> None:
    total, copy, side = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda"), stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total += 1
    torch.cuda.synchronize()
    with late.no_host_waits():
        graph.replay()
    with torch.cuda.stream(side):
        copy.copy_(total)
    side.synchronize()
    assert copy.tolist() == [0, 0, 0, 0]
    assert total.tolist() == [1, 1, 1, 1]


def test_an_optimizer_is_recorded_and_replayed() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, device="cuda"))
    parameter.grad = torch.ones(4, device="cuda")
    optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0, fused=True, capturable=True)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    graph.replay()
    graph.replay()
    assert torch.allclose(parameter.detach().cpu(), torch.full((4,), -0.3), atol=1e-4)
    assert optimizer.state[parameter]["step"].item() == 3


@pytest.mark.parametrize(
    ("mode", "invalidated"), [("global", True), ("thread_local", False), ("relaxed", False)]
)
@pytest.mark.parametrize("call", ["query", "synchronize", "allocate", "pin"])
def test_a_call_of_another_thread_invalidates_a_capture_in_global_mode(
    mode: str, invalidated: bool, call: str, late: LateMachine
) -> None:
    event = torch.cuda.current_stream().record_event()
    failed: list[Exception] = []

    def other() -> None:
        calls: dict[str, Callable[[], object]] = {
            "query": event.query,
            "synchronize": event.synchronize,
            "allocate": _malloc,
            "pin": lambda: torch.cuda.cudart().cudaHostRegister(1 << 40, 4096, 0),  # type: ignore[no-untyped-call]
        }
        try:
            calls[call]()
        except Exception as error:  # noqa: BLE001 - the error is checked below
            failed.append(error)

    graph = torch.cuda.CUDAGraph()
    total = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()

    def record() -> None:
        with torch.cuda.graph(graph, capture_error_mode=mode):
            total.add_(1)
            in_thread(other)

    if invalidated:
        with pytest.raises(RuntimeError, match="captur"):
            record()
    else:
        record()
        graph.replay()
        assert total.tolist() == [1, 1, 1, 1]


def _malloc() -> None:
    """Call cudaMalloc outside torch's allocator, which would guard the call by a relaxed capture mode."""
    import ctypes

    pointer = ctypes.c_void_p()
    ctypes.CDLL("libcudart.so.13").cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(512))


def test_captured_work_cannot_be_waited_for() -> None:
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=r"(?i)captur"), torch.cuda.graph(graph):
        torch.zeros(4, device="cuda").add_(1).cpu()


def test_pageable_memory_cannot_be_captured() -> None:
    live, host = torch.zeros(4, device="cuda"), torch.ones(4)
    graph = torch.cuda.CUDAGraph()

    def recorded() -> None:
        with torch.cuda.graph(graph):
            live.add_(1)
            live.copy_(host, non_blocking=True)

    with pytest.raises(RuntimeError, match=r"(?i)captur"):
        recorded()


@pytest.mark.parametrize("joined", [True, False])
def test_a_branch_has_to_come_back(joined: bool) -> None:
    total, side = torch.zeros(4, device="cuda"), stream()
    graph = torch.cuda.CUDAGraph()

    def record() -> None:
        with torch.cuda.graph(graph):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                total.add_(1)
            if joined:
                torch.cuda.current_stream().wait_stream(side)

    if joined:
        record()
        graph.replay()
        assert total.tolist() == [1, 1, 1, 1]
    else:
        with pytest.raises(RuntimeError, match=r"904|[Uu]njoined"):
            record()


def test_a_graph_cannot_wait_for_what_is_outside_of_it() -> None:
    outside = stream()
    with torch.cuda.stream(outside):
        torch.zeros(4, device="cuda").add_(1)
        event = outside.record_event()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=r"905|isolation|captur"), torch.cuda.graph(graph):
        torch.cuda.current_stream().wait_event(event)
