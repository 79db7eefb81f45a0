"""Memory of slots and areas is locked in a thread beside the training, and is unlocked whatever happens."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.late.control import LateMachine
from tests.late.whole_saves import DeviceRank
from tests.unit.trainer_side.tiers.ranks import until
from trainer_side.save import host_memory
from trainer_side.save.device_stream import DeviceRuntime

pytestmark = pytest.mark.late("lazy")
SLOTS = 3
SECONDS = 60


class Locks:
    """Records each lock of much memory with its thread. Locks by other threads wait for permission."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.may = threading.Event()
        self.may.set()

    def note(self, lock: Callable[..., int]) -> Callable[..., int]:
        def noted(runtime: DeviceRuntime, address: int, nbytes: int) -> int:
            if nbytes > 9 << 20:  # not the 8 MiB buffer for small tensors
                self.threads.append(threading.current_thread().name)
                if len(self.threads) > 1 and threading.current_thread().name == "holdfast-memory":
                    assert self.may.wait(SECONDS)
            return lock(runtime, address, nbytes)

        return noted


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> Locks:
    found = Locks()
    monkeypatch.setattr(DeviceRuntime, "lock", found.note(DeviceRuntime.lock))
    return found


@pytest.fixture(params=["slots", "areas"])
def rank(
    request: pytest.FixtureRequest, tmp_path: Path, tmpfs: Path, monkeypatch: pytest.MonkeyPatch, locks: Locks
) -> Iterator[DeviceRank]:
    """A rank with slots as areas, or with areas of its own."""
    direct = {"tiers": [f"memory:{tmpfs}"], "tier_slots": SLOTS, "store": f"file://{tmp_path}/store"}
    more: dict[str, Any] = direct if request.param == "slots" else {"in_flight_max": SLOTS}
    found = DeviceRank(monkeypatch, device_bytes_max="0", on_full="wait", **more)
    yield found
    locks.may.set()
    found.checkpointer.close()


def done(rank: DeviceRank, step: int) -> None:
    if rank.link.offers:  # with tiers there is no stager
        rank.land(step)
    until(lambda: rank.checkpointer._tiers.is_idle)


def held_bytes(late: LateMachine) -> int:
    gc.collect()
    return late.pinned_bytes()


def test_slots_are_locked_after_the_first_save_and_not_again_by_later_ones(
    rank: DeviceRank, locks: Locks, late: LateMachine
) -> None:
    assert rank.save(0)
    until(lambda: len(locks.threads) == SLOTS)
    assert locks.threads.count("holdfast-memory") >= SLOTS - 1
    until(lambda: not alive(rank))
    done(rank, 0)
    registered = late.count("cudaHostRegister")
    for step in range(1, 2 * SLOTS):
        rank.update()
        assert rank.save(step)
        done(rank, step)
    assert late.count("cudaHostRegister") == registered
    assert len(locks.threads) == SLOTS


def alive(rank: DeviceRank) -> bool:
    ahead = rank.checkpointer._parts.pool._preallocator
    thread = None if ahead is None else ahead._thread
    return thread is not None and thread.is_alive()


def test_a_save_waits_for_no_other_lock_than_its_own(rank: DeviceRank, locks: Locks) -> None:
    locks.may.clear()
    assert rank.save(0)
    done(rank, 0)
    assert alive(rank)


@pytest.mark.parametrize("end", ["close", "another layout"])
def test_memory_being_locked_at_the_end_goes_back(
    rank: DeviceRank, locks: Locks, late: LateMachine, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks.may.clear()
    assert rank.save(0)
    done(rank, 0)
    until(lambda: len(locks.threads) >= 2)
    before, held = rank.checkpointer._parts.pool._preallocator, held_bytes(late)
    if end == "close":
        threading.Timer(0.1, locks.may.set).start()
        rank.checkpointer.close()
        assert not alive(rank)
    else:
        rank.state["more"] = torch.ones(5)
        rank.model.register_buffer("another", torch.ones(7, device="cuda"))
        locks.may.set()
        rank.update()
        assert rank.save(1)
        done(rank, 1)
    until(lambda: before is None or before._thread is None or not before._thread.is_alive())
    if end == "close":
        until(lambda: held_bytes(late) == held)


def test_a_refused_lock_is_said_and_the_step_is_saved(
    rank: DeviceRank, late: LateMachine, caplog: pytest.LogCaptureFixture
) -> None:
    late.fail("cudaHostRegister", times=100)
    assert rank.save(0)
    done(rank, 0)
    assert "error 2: no more memory may be locked" in caplog.text


def test_no_graph_that_training_records_is_ended_by_a_lock(rank: DeviceRank, locks: Locks) -> None:
    locks.may.clear()
    assert rank.save(0)
    done(rank, 0)
    until(lambda: len(locks.threads) >= 2)
    numbers = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        numbers.add_(1)
        locks.may.set()
        until(lambda: not alive(rank))
    graph.replay()
    assert numbers.tolist() == [1] * 4


def test_a_forked_child_has_no_area_and_unlocks_nothing(late: LateMachine) -> None:
    torch.zeros(1, device="cuda")
    memory = host_memory.locked_buffer(4 << 20)
    address, before = memory.data_ptr(), late.pinned_bytes()
    child = os.fork()
    if not child:
        mapped = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        there = any(int(begin, 16) <= address < int(end, 16) for begin, end in mapped)
        del memory
        gc.collect()
        os._exit(2 if there else int(late.pinned_bytes() != before))
    assert os.waitpid(child, 0)[1] == 0
    assert late.pinned_bytes() == before
    memory.fill_(7)
