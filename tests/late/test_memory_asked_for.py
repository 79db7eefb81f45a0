"""A training step that needs all remaining memory of the device gets it, after a save and during a copy."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.late.control import LateMachine
from tests.late.whole_saves import DeviceRank, as_late_as_may_be
from trainer_side.save.copier import Copier, CopyJob

pytestmark = pytest.mark.late("lazy", "side_lazy")
SECONDS_MAX = 60
_MIB = 1 << 20
_LEFT_MIB = 80  # of the device, beside other users' memory
_HOLE_BYTES = 3 * _MIB // 2  # the smallest that torch takes from a segment of large blocks
_BESIDE_BYTES = 4 * _MIB  # used by a step beside its one large activation
_ONE_PIECE_MIB = 400
_ROOM_MIB, _NO_ROOM_MIB = 160, 60  # free beside; saves leave a tenth of the device alone
_SEGMENT_BYTES = 12 * _MIB  # a block that torch takes for itself alone
_MIRRORED = "copied on the device first"


def block(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


def filled_up(left_mib: int = _LEFT_MIB) -> tuple[list[torch.Tensor], int]:
    """Fill the device; return the blocking tensors, and the number of free bytes, which lie in one piece."""
    gc.collect()
    torch.cuda.empty_cache()
    kept, before = [], torch.cuda.memory_reserved()
    while torch.cuda.memory_reserved() == before:
        kept.append(block(_HOLE_BYTES))
    kept.pop()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    for mib in itertools.count(left_mib):  # the device's memory has holes too
        try:
            kept.append(block(free - mib * _MIB))
            break
        except torch.OutOfMemoryError:
            continue
    return kept, torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("limit", [{}, {"device_bytes_max": "0"}], ids=["default", "no mirror"])
def test_an_activation_that_fills_the_device_is_given(
    limit: dict[str, Any], late: LateMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy begins only after the step after its save has allocated all of its memory."""
    may_copy, copy = threading.Event(), Copier._copy

    def late_copy(copier: Copier, job: CopyJob) -> None:
        assert may_copy.wait(SECONDS_MAX)
        copy(copier, job)

    monkeypatch.setattr(Copier, "_copy", late_copy)
    rank = DeviceRank(monkeypatch, in_flight_max=1, **limit)
    kept, left = filled_up()
    before = late.device_bytes()
    for step in range(5):
        activation = block(left - _BESIDE_BYTES)
        del activation
        may_copy.set()
        rank.update()
        if step:
            rank.land(step - 1)
        if step > 1:  # the first save finishes its own copy: no hook is proven yet
            may_copy.clear()
        rank._noted = {f"model.{name}": one.cpu() for name, one in rank.model.state_dict().items()}
        assert rank.checkpointer.save(step)
    may_copy.set()
    rank.land(4)
    rank.checkpointer.close()
    torch.cuda.empty_cache()
    assert late.device_bytes() - before <= _BESIDE_BYTES
    del kept


@pytest.mark.late("lazy", "side_lazy", "eager", "dice:1")
def test_a_block_that_torch_keeps_is_given_in_one_piece_while_a_mirror_lives(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The device has room for a mirror beside the block, and not for a second such block."""
    caplog.set_level("INFO", "holdfast.trainer")
    may_begin = as_late_as_may_be(monkeypatch)
    rank = DeviceRank(monkeypatch, in_flight_max=1)
    kept, _ = filled_up(_ONE_PIECE_MIB + _ROOM_MIB)
    for step in range(5):
        activation = block(_ONE_PIECE_MIB * _MIB)
        del activation
        may_begin.set()
        rank.update()
        if step:
            rank.land(step - 1)
        may_begin.clear()
        rank._noted = {f"model.{name}": one.cpu() for name, one in rank.model.state_dict().items()}
        assert rank.checkpointer.save(step)
        assert may_begin.is_set() is (step < 1), "whether save() ends its copy"
    may_begin.set()
    rank.land(4)
    rank.checkpointer.close()
    assert _MIRRORED in caplog.text
    del kept


def of_a_graph(nbytes: int) -> object:
    """Memory reserved for the replays of a graph."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        block(nbytes).fill_(1)
    return graph


def of_a_pool(nbytes: int) -> object:
    """Memory reserved for tensors made under this pool."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        block(nbytes)
    return pool


@pytest.mark.late("lazy")
@pytest.mark.parametrize("beside_mib", [_NO_ROOM_MIB, _ROOM_MIB], ids=["no room", "room"])
@pytest.mark.parametrize("private", [of_a_graph, of_a_pool])
def test_private_memory_that_is_not_in_use_is_no_room_for_a_mirror(
    private: Callable[[int], object],
    beside_mib: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "holdfast.trainer")
    rank = DeviceRank(monkeypatch, in_flight_max=1)
    kept, _ = filled_up(_ONE_PIECE_MIB + beside_mib)
    owner = private(_ONE_PIECE_MIB * _MIB)
    torch.cuda.reset_peak_memory_stats()
    for step in range(3):
        assert rank.save(step)
        rank.update()
        rank.land(step)
    rank.checkpointer.close()
    assert (_MIRRORED in caplog.text) is (beside_mib == _ROOM_MIB)
    del owner, kept


@pytest.mark.late("lazy", "side_lazy", "eager")
@pytest.mark.parametrize("limit", ["1GiB", "0"], ids=["mirror", "gate"])
def test_memory_of_a_copy_is_kept_by_torch_and_in_use_no_longer_than_the_copy(
    limit: str, late: LateMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next save reuses the memory; `empty_cache` frees all of it."""
    rank = DeviceRank(monkeypatch, device_bytes_max=limit, in_flight_max=1)
    rank.save(0)
    rank.land(0)
    assert rank.checkpointer._copier._idle.wait(SECONDS_MAX)
    gc.collect()  # else leftovers of the test before would be freed during the test
    torch.cuda.empty_cache()
    before = late.device_bytes()
    for step in range(1, 5):
        rank.note()
        torch.cuda.synchronize()
        allocated, calls = torch.cuda.memory_allocated(), late.count("cudaMalloc")
        in_save = late.count("cudaMalloc", of_this_thread=True)
        assert rank.checkpointer.save(step)
        in_save = late.count("cudaMalloc", of_this_thread=True) - in_save
        rank.update()
        rank.land(step)
        assert rank.checkpointer._copier._idle.wait(SECONDS_MAX)
        calls = late.count("cudaMalloc") - calls
        assert calls == in_save, "the copy thread has taken some"
        assert bool(calls) is (step == 1)
        assert torch.cuda.memory_allocated() == allocated
    assert late.device_bytes() - before > 8 * _MIB
    rank._noted.clear()
    rank.checkpointer.close()
    torch.cuda.empty_cache()
    assert late.device_bytes() <= before


@pytest.mark.late("lazy", "side_lazy", "eager", "dice:1")
@pytest.mark.parametrize("limit", [{}, {"device_bytes_max": "0"}], ids=["default", "no mirror"])
def test_training_that_wants_what_is_kept_for_copies_gets_it_and_goes_on_saving(
    limit: dict[str, Any], late: LateMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training allocates all unused memory, without calling `empty_cache`."""
    rank = DeviceRank(monkeypatch, in_flight_max=1, **limit)
    for step in range(4):
        assert rank.save(step)
        rank.update()
        rank.land(step)
        assert rank.checkpointer._copier._idle.wait(SECONDS_MAX)
    rank._noted.clear()
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    assert kept > _SEGMENT_BYTES, "nothing is kept, and nothing shown"
    activations, reserved = [], torch.cuda.memory_reserved()
    with contextlib.suppress(torch.OutOfMemoryError):
        while True:
            activations.append(block(_SEGMENT_BYTES))
    left = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == left, "something was kept from the training"
    assert left > reserved
    if rank.checkpointer.save(4):  # a save may be declined here, but never raises
        rank.land(4)
    assert rank.checkpointer._copier._idle.wait(SECONDS_MAX)
    activations.clear()
    rank.update()
    rank._noted = {f"model.{name}": one.cpu() for name, one in rank.model.state_dict().items()}
    assert rank.checkpointer.save(5)
    rank.update()
    rank.land(5)
    rank.checkpointer.close()


@pytest.mark.late("lazy")
def test_a_step_that_is_withdrawn_gives_it_back_as_well(
    late: LateMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = DeviceRank(monkeypatch, device_bytes_max="0", in_flight_max=1)
    for step in range(3):
        assert rank.save(step)
        rank.land(step)
    assert rank.checkpointer._copier._idle.wait(SECONDS_MAX)
    before = late.device_bytes()
    rank.base().data[7] = 1  # torch does not count it
    rank.save(3)
    assert rank.checkpointer._copier._idle.wait(SECONDS_MAX)
    assert 3 in rank.link.declined
    assert late.device_bytes() == before
    rank.checkpointer.close()
