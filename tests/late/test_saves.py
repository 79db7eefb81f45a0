"""Whole saves on the late device: each copy strategy, other streams, recorded graphs, a full device, errors."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from holdfast.errors import ConfigError
from holdfast.image.layout import Layout
from holdfast.image.save_record import SaveRecord
from holdfast.telemetry.causes import DeclineCause
from tests.late.control import LateMachine
from tests.late.whole_saves import MIRROR, DeviceRank, as_late_as_may_be, counted
from trainer_side.save import device_copy as mirrors
from trainer_side.save.copier import Copier, CopyJob
from trainer_side.save.device_stream import DeviceStream, stream_of
from trainer_side.save.fingerprint import DeviceSamples, Fingerprints
from trainer_side.save.parcel import Packing, Parcel
from trainer_side.save.staging import Staging
from trainer_side.state.survey import StoragePart, StorageSource
from trainer_side.transfer import Transfer, TransferState

pytestmark = pytest.mark.late("lazy")
SECONDS_MAX = 60
STEPS_MAX = 40
_WORDS_BYTES = 4096


@contextmanager
def _deterministic() -> Iterator[None]:
    """In this mode torch fills new tensors with NaNs, on the stream that makes them."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.late("lazy", "side_lazy", "dice:1")
@MIRROR
def test_each_way_of_a_copy_gives_the_bytes_of_the_moment(
    mirror: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = DeviceRank(monkeypatch, device_bytes_max=mirror)
    for step in range(4):
        assert rank.save(step)
        rank.update()
        rank.land(step)
    rank.checkpointer.close()


@pytest.mark.late("lazy", "side_lazy", "dice:1")
@pytest.mark.parametrize(
    "chosen", [_deterministic, partial(torch.device, "cuda")], ids=["filled", "on device"]
)
@MIRROR
def test_a_save_ignores_what_the_script_has_chosen_for_new_tensors(
    mirror: str, chosen: Callable[[], AbstractContextManager[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = DeviceRank(monkeypatch, device_bytes_max=mirror)
    for step in range(4):
        with chosen():
            assert rank.save(step)
        rank.update()
        with chosen():
            rank.land(step)
    rank.checkpointer.close()


@pytest.mark.parametrize("limit", ["6MiB", "1GiB"], ids=["part", "mirror"])
def test_with_a_mirror_nothing_of_the_state_crosses_on_the_trainings_stream(
    limit: str, late: LateMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even tensors that may have changed; with a mirror of all this holds for the first save too."""
    rank = DeviceRank(monkeypatch, device_bytes_max=limit, in_flight_max=1)
    crossed = []
    for step in range(3):
        rank._noted = {f"model.{name}": one.cpu() for name, one in rank.model.state_dict().items()}
        with counted(late, 0) as streams:
            assert rank.checkpointer.save(step)
        crossed.append(streams[0].to_host)
        rank.update()
        rank.land(step)
    assert max(crossed[1:]) <= _WORDS_BYTES, "words and hashes by which the copy is checked"
    assert (crossed[0] <= _WORDS_BYTES) is (limit == "1GiB")
    rank.checkpointer.close()


@pytest.mark.late("lazy", "side_lazy")
@MIRROR
def test_where_tensors_cannot_be_viewed_by_address_the_bytes_are_right_too(
    mirror: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On XPU, for example."""
    rank = DeviceRank(monkeypatch, device_bytes_max=mirror)
    monkeypatch.setattr(stream_of(rank.base().device), "span", lambda *_: None)
    for step in range(4):
        assert rank.save(step)
        rank.update()
        rank.land(step)
    rank.checkpointer.close()


@pytest.mark.parametrize("by_address", [True, False])
@MIRROR
def test_memory_of_tensors_that_training_has_replaced_is_not_kept(
    mirror: str, by_address: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views of live tensors are kept from save to save, and training may replace the tensors at any time."""
    rank = DeviceRank(monkeypatch, device_bytes_max=mirror, in_flight_max=1)
    if not by_address:
        monkeypatch.setattr(stream_of(rank.base().device), "span", lambda *_: None)
    for step in range(4):
        assert rank.save(step)
        rank.update()
        rank.land(step)
        assert rank.checkpointer._copier._idle.wait(SECONDS_MAX)
        gc.collect()
        before = torch.cuda.memory_allocated()
        rank.base().data = rank.base().data.clone()
        assert torch.cuda.memory_allocated() == before
    rank.checkpointer.close()


def test_save_does_not_wait_for_the_device_where_there_is_a_mirror(
    late: LateMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = DeviceRank(monkeypatch, device_bytes_max="1GiB", in_flight_max=1)
    for step in range(5):
        rank.note()
        if step < 2:
            assert rank.checkpointer.save(step)
        else:
            with late.no_host_waits():
                assert rank.checkpointer.save(step)
        rank.update()
        rank.land(step)
    rank.checkpointer.close()


@MIRROR
def test_a_save_on_another_stream_comes_behind_the_training(
    mirror: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = DeviceRank(monkeypatch, device_bytes_max=mirror)
    other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for step in range(3):
        rank.update()
        rank.note()
        with torch.cuda.stream(other):
            assert rank.checkpointer.save(step)
        rank.update()
        rank.land(step)
    rank.checkpointer.close()


def test_a_save_comes_behind_updates_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = DeviceRank(monkeypatch, device_bytes_max="1GiB")
    other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for step in range(3):
        with torch.cuda.stream(other):
            rank.update()
            rank.note()
        assert rank.checkpointer.save(step)
        with torch.cuda.stream(other):
            rank.update()
        rank.land(step)
    rank.checkpointer.close()


def test_a_save_while_a_graph_is_recorded_is_declined_and_the_graph_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = DeviceRank(monkeypatch, device_bytes_max="0")
    assert rank.save(0)
    rank.land(0)
    graph, total = torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        total += 1
        assert not rank.checkpointer.save(1)
    assert "graph is being recorded" in rank.link.declined[1].text
    graph.replay()
    assert total.tolist() == [1] * 4
    rank.checkpointer.close()


def recorded_update(rank: DeviceRank) -> torch.cuda.CUDAGraph:
    """Record an update as a graph, after three saves, which prove the hooks."""
    for step in range(3):
        assert rank.save(step)
        rank.update()
        rank.land(step)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        rank.update()
    return graph


@MIRROR
def test_a_replayed_update_does_not_tear_a_copy(mirror: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mirror no hook holds the replay back: `save()` must finish the copy first."""
    rank = DeviceRank(monkeypatch, device_bytes_max=mirror)
    graph = recorded_update(rank)
    for step in range(3, 6):
        assert rank.save(step)
        graph.replay()
        torch.cuda.synchronize()
        rank.land(step)
    rank.checkpointer.close()


@MIRROR
def test_a_replayed_update_before_a_late_copy_is_not_in_it(
    mirror: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy begins after the replay, unless `save()` itself waits for the copy, as it must without a mirror."""
    may_begin = as_late_as_may_be(monkeypatch)
    rank = DeviceRank(monkeypatch, device_bytes_max=mirror)
    may_begin.set()
    graph = recorded_update(rank)
    for step in range(3, 6):
        may_begin.clear()
        assert rank.save(step)
        graph.replay()
        torch.cuda.synchronize()
        may_begin.set()
        assert rank.checkpointer._copier._idle.wait(SECONDS_MAX)
        assert rank.link.declined == {}
        rank.land(step)
    rank.checkpointer.close()


@pytest.mark.parametrize("torn", [False, True], ids=["device", "host"])
def test_beside_a_mirror_only_what_is_in_host_memory_can_be_torn(
    torn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor changes outside any optimizer's step, after `save()` and before its copy begins."""
    may_begin = as_late_as_may_be(monkeypatch)
    here = torch.nn.Parameter(torch.zeros(1 << 20))
    here.grad = torch.ones_like(here)
    there = torch.optim.SGD([here], lr=1)
    beside = {"here": torch.nn.ParameterList([here]), "host": there}
    rank = DeviceRank(monkeypatch, beside=beside, device_bytes_max="1GiB")
    for step in range(3):  # these saves prove the hooks
        may_begin.set()
        assert rank.save(step)
        rank.update()
        there.step()
        rank.land(step)
    may_begin.clear()
    assert rank.save(3)
    assert not may_begin.is_set(), "save() has waited for its copy"
    changed = here if torn else rank.model.get_parameter("0.weight")
    with torch.no_grad():
        changed.add_(1)
    may_begin.set()
    assert rank.checkpointer._copier._idle.wait(SECONDS_MAX)
    if torn:
        assert rank.link.declined[3].cause == DeclineCause.TORN
        assert "here" in rank.link.declined[3].text
    else:
        assert rank.link.declined == {}
        rank.land(3)
    rank.checkpointer.close()


def test_the_copy_thread_does_not_end_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    recording, copy = threading.Event(), Copier._copy

    def late_copy(copier: Copier, job: CopyJob) -> None:
        assert recording.wait(SECONDS_MAX)
        copy(copier, job)

    monkeypatch.setattr(Copier, "_copy", late_copy)
    rank = DeviceRank(monkeypatch, device_bytes_max="1GiB")
    assert rank.save(0)
    graph, total = torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):
        total += 1
        recording.set()
        assert rank.checkpointer._copier._idle.wait(SECONDS_MAX)
    assert rank.link.declined == {}
    graph.replay()
    assert total.tolist() == [1] * 4
    rank.land(0)
    rank.checkpointer.close()


@MIRROR
def test_after_an_error_nothing_writes_into_the_area(mirror: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes after one queued parcel, after two, and so on until a copy needs fewer parcels."""
    record_event, left = DeviceStream.record_event, 0

    def failing(lane: DeviceStream) -> Any:
        nonlocal left
        if threading.current_thread().name == "holdfast-copy":
            left -= 1
            if left == 0:
                raise RuntimeError("planted")
        return record_event(lane)

    monkeypatch.setattr(mirrors, "_SECTION_BYTES", 1 << 20)
    rank = DeviceRank(monkeypatch, device_bytes_max=mirror, in_flight_max=1)
    monkeypatch.setattr(DeviceStream, "record_event", failing)
    for step in range(STEPS_MAX):
        left = step + 1
        assert rank.save(step)
        assert rank.checkpointer._copier._idle.wait(SECONDS_MAX)
        if step not in rank.link.declined:
            rank.land(step)  # zip headers are whole in spite of the earlier errors
            break
        assert rank.link.declined[step].cause == DeclineCause.COPY_FAILED
        transfer, area = rank.link.offers[step]
        transfer.set_state(TransferState.DECLINED, rank.link.declined[step])
        kept = area.memory.clone()
        area.memory.fill_(0x55)
        torch.cuda.synchronize()
        assert bool((area.memory == 0x55).all())
        area.memory.copy_(kept)
    assert 2 < step < STEPS_MAX - 1
    rank.checkpointer.close()


@MIRROR
def test_a_full_device_never_ends_the_training(
    mirror: str, late: LateMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = DeviceRank(monkeypatch, device_bytes_max=mirror, in_flight_max=1)
    taken = []
    for step in range(6):
        rank.note()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        late.fail("cudaMalloc", after=step, times=1000)
        taken.append(rank.checkpointer.save(step))
        late.heal()
        rank.update()
        if taken[-1]:
            rank.land(step)
        else:
            assert rank.link.declined[step].cause == DeclineCause.NO_MEMORY
    assert any(taken)
    rank.checkpointer.close()


def test_memory_of_a_mirror_of_a_step_that_is_refused_serves_others_only_behind_its_copies(
    late: LateMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this order other steps would get memory that the device is still going to write."""
    rank = DeviceRank(monkeypatch, device_bytes_max="1GiB")

    def refused(step: int, _area: Staging, record: SaveRecord, _layout: Layout) -> Transfer:
        return Transfer.not_sent(step, record, DeclineCause.BUSY.because("it is a test"))

    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    monkeypatch.setattr(rank.link, "offer", refused)
    assert not rank.checkpointer.save(0)
    assert torch.cuda.memory_allocated() - allocated < 1 << 20, "the factors of hashes alone are kept"
    lane = stream_of(rank.base().device)
    with late.no_mapping():
        memory = lane.allocate(8 << 20)
    with lane.on_own_stream(None):
        memory.fill_(7)
        lane.record_event().synchronize()
    torch.cuda.synchronize()
    assert bool((memory.cpu() == 7).all()), "the mirror was written after its memory had gone back"
    rank.checkpointer.close()


@pytest.mark.parametrize("failed", ["bring", "mirror"])
def test_after_an_error_nothing_is_kept_of_the_device(failed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("planted")

    rank = DeviceRank(monkeypatch, device_bytes_max="1GiB", in_flight_max=1)
    assert rank.save(0)
    rank.land(0)
    assert rank.checkpointer._copier._idle.wait(SECONDS_MAX)
    before = torch.cuda.memory_allocated()
    if failed == "bring":
        monkeypatch.setattr(Parcel, "send", failing)
        assert rank.save(1)
        assert rank.checkpointer._copier._idle.wait(SECONDS_MAX)
        assert rank.link.declined[1].cause == DeclineCause.COPY_FAILED
    else:
        monkeypatch.setattr(Packing, "queue", failing)
        with pytest.raises(RuntimeError, match="planted"):
            rank.save(1)
        torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    rank.checkpointer.close()


def test_the_limit_of_host_memory_counts_all_that_is_locked(
    late: LateMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = DeviceRank(monkeypatch, device_bytes_max="0")
    assert first.save(0)
    first.land(0)
    area = first.link.offers[0][1].area_bytes
    first.checkpointer.close()
    del first
    small = DeviceRank(monkeypatch, device_bytes_max="0", host_bytes_max=area - 1)
    with pytest.raises(ConfigError, match="host_bytes_max"):
        small.save(0)
    small.checkpointer.close()
    torch._C._host_emptyCache()  # words and hashes of earlier saves
    before, limit = late.pinned_bytes(), 2 * area
    rank = DeviceRank(monkeypatch, device_bytes_max="0", in_flight_max=4, host_bytes_max=limit)
    assert [rank.save(step) for step in range(3)] == [True, True, False]
    assert rank.checkpointer._saver._pool._areas.count_max == 2
    assert late.pinned_bytes() - before <= limit + 8 * _WORDS_BYTES, "beside words and hashes"
    rank.checkpointer.close()


def test_fingerprints_of_a_device_are_those_of_the_same_bytes_on_the_host() -> None:
    sizes = [1, 3, 63, 64, 65, 4095, 4096, 4097, 5000, 100_000, 64 * 64 * 5 + 7, 1 << 20]
    torch.manual_seed(0)
    here = [torch.randint(0, 256, (nbytes,), dtype=torch.uint8) for nbytes in sizes]
    samples: dict[torch.device, DeviceSamples] = {}
    for step in range(8):
        texts = []
        for tensors in (here, [tensor.cuda() for tensor in here]):  # the tensors move at each step
            sources = [
                StoragePart(one.untyped_storage(), 0, one.nbytes).source(n) for n, one in enumerate(tensors)
            ]
            fingerprints = Fingerprints(range(len(sizes)), [False] * len(sizes), step, samples=samples)
            fingerprints.sample_now(sources)
            texts.append(fingerprints.text())
        assert texts[0] == texts[1]
    assert len(samples) == 1


def test_fingerprints_of_another_device_are_waited_for() -> None:
    there = torch.zeros(1 << 14, dtype=torch.uint8, device="cuda:1")
    torch.cuda.synchronize(1)
    there.fill_(9)
    here = torch.full((1 << 14,), 9, dtype=torch.uint8)
    texts = []
    for tensor in (there, here):
        memory = tensor.untyped_storage()
        source = StorageSource(0, memory, 0, memory.nbytes(), tensor.data_ptr(), tensor.device)
        fingerprints = Fingerprints([0], [False], 3)
        fingerprints.sample_now([source])
        texts.append(fingerprints.text())
    assert texts[0] == texts[1]
