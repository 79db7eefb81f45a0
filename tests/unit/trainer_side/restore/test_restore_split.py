"""Restore into split tensors: each rank gets its own parts of whole tensors, from the store and from tiers."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.errors import DamageError, StateError
from holdfast.telemetry.events import EventLog
from tests.support.restoring import CountingStore, Ranks, ThreadPeers, publish
from tests.support.slices import DictTier, checkpoint
from trainer_side.ranks.peers import LonePeers
from trainer_side.restore import restore_attempt, scatter, targets
from trainer_side.restore.broadcast import _AHEAD, _BATCH
from trainer_side.restore.restore import restore
from trainer_side.restore.restore_attempt import Restored
from trainer_side.state.split_tensor import Split
from trainer_side.tiers.tier import Nearness

_DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]


class Box(NamedTuple):
    """A part of a tensor."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the box's part of a whole tensor."""
        slices = (slice(start, start + size) for start, size in zip(self.start, self.size, strict=True))
        return whole[tuple(slices)]

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Split:
        """Return memory for the part, with other values."""
        return Split(torch.full(self.size, 77).to(dtype), shape, self.start)


def rows(shape: Sequence[int], ranks: int, rank: int, dimension: int = 0) -> Box:
    """Return a rank's rows as `torch.chunk` splits: the last parts may be short, or empty."""
    each = -(-shape[dimension] // ranks)
    begin = min(each * rank, shape[dimension])
    start, size = [0] * len(shape), [*shape]
    start[dimension], size[dimension] = begin, min(each, shape[dimension] - begin)
    return Box(tuple(start), tuple(size))


def numbers(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    count = int(torch.tensor(shape).prod())
    return ((torch.arange(count) * 7 + seed) % 251).to(dtype).reshape(*shape)


class Weights(nn.Module):
    """A module of which every rank saves a share, also of plain parameters."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def bring_back(
    root: Path,
    states: Sequence[dict[str, Any]],
    *,
    store: CountingStore | None = None,
    tiers: Sequence[list[Any]] = (),
    flip: Callable[[int, memoryview], None] | None = None,
) -> list[Restored]:
    """Restore each rank's state."""
    the_store = store or CountingStore(root, request_bytes=1 << 13)

    def work(peers: ThreadPeers) -> Restored:
        mine = tiers[peers.rank] if tiers else []
        result = restore(states[peers.rank], the_store, peers, events=None, tiers=mine)
        assert result is not None
        return result

    return Ranks(len(states), flip=flip).run(work)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], int, dict[str, list[Box | None]], int]:
    """Draw whole tensors; ranks; each rank's box of each tensor (None: the whole tensor); bytes of a chunk."""
    ranks = draw(st.integers(1, 3))
    whole, boxes = {}, {}
    for number in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
        name = f"t{number}"
        whole[name] = numbers(shape, draw(st.sampled_from(_DTYPES)), number)
        cuts = [sorted(draw(st.lists(st.integers(0, size), max_size=2))) for size in shape]
        spans = [list(itertools.pairwise([0, *cut, size])) for cut, size in zip(cuts, shape, strict=True)]
        cells = list(itertools.product(*spans))
        found: list[Box | None] = []
        for _ in range(ranks):
            cell = draw(st.sampled_from([None, *cells]))
            if cell is None:
                found.append(None)
            else:
                found.append(
                    Box(tuple(begin for begin, _ in cell), tuple(end - begin for begin, end in cell))
                )
        boxes[name] = found
    return whole, ranks, boxes, draw(st.sampled_from([4096, 8192, 1 << 20]))


def _states(
    whole: dict[str, torch.Tensor], ranks: int, boxes: dict[str, list[Box | None]]
) -> list[dict[str, Any]]:
    def live(name: str, rank: int) -> Any:
        box, tensor = boxes[name][rank], whole[name]
        return torch.zeros_like(tensor) if box is None else box.empty(tensor.shape, tensor.dtype)

    return [
        {"split": {name: live(name, rank) for name in whole}, "y": torch.zeros(5)} for rank in range(ranks)
    ]


def _check(
    states: list[dict[str, Any]], whole: dict[str, torch.Tensor], boxes: dict[str, list[Box | None]]
) -> None:
    for rank, state in enumerate(states):
        assert torch.equal(state["y"], torch.arange(5.0))
        for name, tensor in whole.items():
            live, box = state["split"][name], boxes[name][rank]
            if box is None:
                assert torch.equal(live, tensor)
            else:
                assert torch.equal(live.tensor, box.of(tensor))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenes())
def test_a_rank_restores_any_part_of_any_tensor_from_the_store(scene: Any) -> None:
    whole, ranks, boxes, chunk_bytes = scene
    with tempfile.TemporaryDirectory() as root:
        publish(Path(root), 5, {"split": whole, "y": torch.arange(5.0)}, chunk_bytes=chunk_bytes)
        states = _states(whole, ranks, boxes)
        bring_back(Path(root), states)
    _check(states, whole, boxes)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenes(), st.integers(1, 3))
def test_a_rank_restores_any_part_of_any_tensor_from_tiers(scene: Any, saved_ranks: int) -> None:
    whole, ranks, boxes, chunk_bytes = scene
    made = checkpoint(
        lambda _rank: {"split": Weights(whole), "y": torch.arange(5.0)},
        ranks=saved_ranks,
        step=5,
        chunk_bytes=chunk_bytes,
    )
    tiers: list[list[Any]] = [[DictTier()] for _ in range(ranks)]
    for saved_rank in range(saved_ranks):
        tiers[saved_rank % ranks][0].put(made, saved_rank)
    states = _states(whole, ranks, boxes)
    with tempfile.TemporaryDirectory() as root:
        store = CountingStore(Path(root))
        bring_back(Path(root), states, store=store, tiers=tiers)
    _check(states, whole, boxes)
    assert store.bytes_read == 0


@pytest.mark.parametrize("dimension", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_each_chunk_is_read_once_and_each_rank_gets_what_it_holds_and_no_more(
    tmp_path: Path, dimension: int, replicas: int
) -> None:
    whole = numbers((64, 1024))
    manifest = publish(tmp_path, 5, {"w": whole, "y": torch.arange(5.0)}, chunk_bytes=4096)
    shards = 4 // replicas
    boxes = [rows(whole.shape, shards, rank % shards, dimension) for rank in range(4)]
    states: list[dict[str, Any]] = [
        {"w": box.empty(whole.shape, whole.dtype), "y": torch.zeros(5)} for box in boxes
    ]
    store, ranks = CountingStore(tmp_path, request_bytes=4096), Ranks(4)

    def work(peers: ThreadPeers) -> Restored:
        result = restore(states[peers.rank], store, peers, events=None)
        assert result is not None
        return result

    results = ranks.run(work)
    for box, state in zip(boxes, states, strict=True):
        assert torch.equal(state["w"].tensor, box.of(whole))
    offsets = [offset for offset, nbytes in store.requests if nbytes == 4096]
    inside = [offset for offset in offsets if 8192 <= offset < 200_000]
    assert len(set(inside)) == len(inside) > 40
    for result in results:
        # A quarter, plus a few chunks with the state that is not split.
        assert abs(result.bytes_read - whole.nbytes / 4) <= 6 * manifest.chunk_bytes
        assert sum(use.nbytes for use in result.sources.values()) == result.bytes_read
    held_bytes = replicas * whole.nbytes
    sent_bytes = sum(peers.sent_bytes for peers in ranks.peers)
    # Bytes in chunks that their holder has read are not sent; in few chunks one rank's rows end and another's begin.
    read_by_holder = held_bytes / 4 if dimension == 1 else whole.nbytes
    assert sent_bytes == pytest.approx(held_bytes - read_by_holder, abs=4 * manifest.chunk_bytes)


def test_small_tensors_between_parts_are_not_read_a_second_time(tmp_path: Path) -> None:
    whole, steps = (
        [numbers((8, 1024), seed=seed) for seed in range(8)],
        [torch.tensor(float(n)) for n in range(8)],
    )
    tree = {"moments": [list(pair) for pair in zip(whole, steps, strict=True)]}
    manifest = publish(tmp_path, 5, tree, chunk_bytes=4096)
    boxes = [rows((8, 1024), 2, rank) for rank in range(2)]
    states: list[dict[str, Any]] = [
        {"moments": [[box.empty((8, 1024), torch.float32), torch.zeros(())] for _ in whole]} for box in boxes
    ]
    results = bring_back(tmp_path, states)
    for box, state in zip(boxes, states, strict=True):
        for number, (part, step) in enumerate(state["moments"]):
            assert torch.equal(part.tensor, box.of(whole[number]))
            assert step.item() == number
    # Once, except the chunks at the ends, which are read with the state of all ranks.
    assert sum(result.bytes_read for result in results) <= manifest.image_bytes + 3 * manifest.chunk_bytes


def test_a_byte_that_changes_on_its_way_to_another_rank_is_damage(tmp_path: Path) -> None:
    whole = numbers((64, 256))
    publish(tmp_path, 5, {"w": whole}, chunk_bytes=4096)
    boxes = [rows(whole.shape, 2, rank, 1) for rank in range(2)]
    states = [{"w": box.empty(whole.shape, whole.dtype)} for box in boxes]

    def flip(rank: int, memory: memoryview) -> None:
        if rank == 1 and len(memory) > 1000:
            memory[999] ^= 1

    with pytest.raises(DamageError, match=r"differ after the exchange among the ranks"):
        bring_back(tmp_path, states, flip=flip)


def test_a_chunk_that_is_damaged_in_the_store_is_damage_on_the_ranks_that_did_not_read_it(
    tmp_path: Path,
) -> None:
    whole = numbers((64, 256))
    good = publish(tmp_path, 4, {"w": whole + 1}, chunk_bytes=4096)
    publish(tmp_path, 5, {"w": whole}, chunk_bytes=4096)
    path = tmp_path / "step-000000005.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    boxes = [rows(whole.shape, 3, rank, 1) for rank in range(3)]
    states = [{"w": box.empty(whole.shape, whole.dtype)} for box in boxes]
    for result in bring_back(tmp_path, states):
        assert result.step == good.step
        assert "CRC-32 expected" in result.skipped[0]
    for box, state in zip(boxes, states, strict=True):
        assert torch.equal(state["w"].tensor, box.of(whole + 1))


def test_chunks_packed_for_other_ranks_are_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[scatter.Scatter] = []

    class Spied(scatter.Scatter):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(restore_attempt, "Scatter", Spied)
    whole, chunk_bytes = numbers((256, 1024)), 4096
    publish(tmp_path, 5, {"w": whole}, chunk_bytes=chunk_bytes)
    boxes = [rows(whole.shape, 2, rank, 1) for rank in range(2)]
    states = [{"w": box.empty(whole.shape, whole.dtype)} for box in boxes]
    bring_back(tmp_path, states)
    assert len(made) == 2
    for one in made:
        memory = [len(packed) for packed in one._memory.values()]
        assert 0 < len(memory) <= scatter._AHEAD
        assert max(memory) <= chunk_bytes // 2 + 100


def test_bytes_of_live_parts_are_read_in_place(tmp_path: Path) -> None:
    whole = numbers((8, 100))
    publish(tmp_path, 5, {"w": whole, "y": torch.ones(3)})
    live = rows(whole.shape, 2, 1).empty(whole.shape, whole.dtype)
    address = live.tensor.data_ptr()
    state = {"w": live, "y": torch.zeros(3)}
    log = EventLog(tmp_path / "events", role="trainer", rank=0)
    restore(state, CountingStore(tmp_path), LonePeers(), events=log)
    log.close()
    (line,) = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert line["in_place_bytes"] == live.tensor.nbytes + 12
    assert state["w"] is live
    assert live.tensor.data_ptr() == address
    assert torch.equal(live.tensor, whole[4:])


@pytest.mark.parametrize(
    "saved",
    [
        pytest.param(numbers((6, 8)).to(torch.float64), id="another dtype"),
        pytest.param(numbers((8, 6)).t(), id="transposed"),
        pytest.param(numbers((4, 6, 8))[2], id="view of a larger storage"),
    ],
)
def test_a_tensor_that_lies_otherwise_in_the_file_is_copied(tmp_path: Path, saved: torch.Tensor) -> None:
    publish(tmp_path, 5, {"w": saved, "other": {"x": 1}})
    states = [
        {"w": rows((6, 8), 2, rank, 1).empty((6, 8), torch.float32), "other": {"x": 0}} for rank in range(2)
    ]
    bring_back(tmp_path, states)
    for rank, state in enumerate(states):
        assert torch.equal(state["w"].tensor, rows((6, 8), 2, rank, 1).of(saved).float())  # type: ignore[attr-defined]
        assert state["other"] == {"x": 1}


def test_a_view_with_gaps_is_refused_by_name(tmp_path: Path) -> None:
    publish(tmp_path, 5, {"w": numbers((6, 8))[:, ::2]})
    live = rows((6, 4), 2, 0).empty((6, 4), torch.float32)
    with pytest.raises(StateError, match=r"w: the checkpoint has it as a view with strides \[8, 2\]"):
        restore({"w": live}, CountingStore(tmp_path), LonePeers(), events=None)


@pytest.mark.parametrize("tied_in_file", [True, False])
def test_tied_parts(tmp_path: Path, tied_in_file: bool) -> None:
    first = numbers((6, 8))
    second = first if tied_in_file else numbers((6, 8), seed=9)
    publish(tmp_path, 5, {"a": {"first": first, "second": second}})
    memory = torch.zeros(3, 8)
    state = {"a": {name: Split(memory, (6, 8), (3, 0)) for name in ("first", "second")}}
    restore(state, CountingStore(tmp_path), LonePeers(), events=None)
    assert torch.equal(memory, second[3:])  # like torch: the one loaded last wins


def test_another_whole_shape_is_refused_on_every_rank(tmp_path: Path) -> None:
    publish(tmp_path, 5, {"w": {"x": numbers((6, 8))}})
    states = [{"w": {"x": rows((7, 8), 2, rank).empty((7, 8), torch.float32)}} for rank in range(2)]
    store = CountingStore(tmp_path)
    _, errors = Ranks(2).outcomes(lambda peers: restore(states[peers.rank], store, peers, events=None))
    for state, error in zip(states, errors, strict=True):
        assert isinstance(error, StateError)
        assert "w/x: expected [7, 8], the checkpoint has [6, 8]" in str(error)
        assert bool((state["w"]["x"].tensor == 77).all())


def test_damage_in_one_ranks_part_leads_all_to_the_step_before(tmp_path: Path) -> None:
    older, newer = numbers((64, 256)), numbers((64, 256), seed=3)
    publish(tmp_path, 4, {"w": older}, chunk_bytes=4096)
    manifest = publish(tmp_path, 5, {"w": newer}, chunk_bytes=4096)
    data = bytearray((tmp_path / manifest.file).read_bytes())
    chunk = 12  # rank 1 alone holds the second half
    data[chunk * 4096 + 17] ^= 1
    (tmp_path / manifest.file).write_bytes(data)
    boxes = [rows(newer.shape, 2, rank) for rank in range(2)]
    states = [{"w": box.empty(newer.shape, newer.dtype)} for box in boxes]
    for result in bring_back(tmp_path, states):
        assert result.step == 4
        (reason,) = result.skipped
        assert "rank 1: " in reason
        assert f"{manifest.file}: chunk {chunk} (4096 bytes from {chunk * 4096}): CRC-32 expected" in reason
    for box, state in zip(boxes, states, strict=True):
        assert torch.equal(state["w"].tensor, box.of(older))


def test_a_bit_that_flips_between_the_ranks_is_seen(tmp_path: Path) -> None:
    whole = numbers((64, 256))
    made = checkpoint(lambda _rank: {"w": Weights({"x": whole})}, ranks=2, step=5)
    made.publish(tmp_path)
    tiers = [[DictTier().put(made, rank)] for rank in range(2)]
    flipped: list[int] = []
    bytes_of_it = whole.numpy().tobytes()

    def flip(rank: int, memory: memoryview) -> None:
        if rank == 1 and memory.nbytes > 2000 and not flipped and bytes(memory) in bytes_of_it:
            memory[1999] ^= 1
            flipped.append(rank)

    boxes = [rows(whole.shape, 2, rank) for rank in range(2)]
    states = [{"w": {"x": box.empty(whole.shape, whole.dtype)}} for box in boxes]
    for result in bring_back(tmp_path, states, tiers=tiers, flip=flip):
        assert flipped
        assert "after the exchange among the ranks" in result.skipped[0]
    for box, state in zip(boxes, states, strict=True):  # this time from the store
        assert torch.equal(state["w"]["x"].tensor, box.of(whole))


def test_a_damaged_frame_of_a_split_tensor_is_taken_from_the_store(tmp_path: Path) -> None:
    whole = numbers((64, 256))
    made = checkpoint(lambda _rank: {"w": Weights({"x": whole})}, ranks=2, step=5)
    made.publish(tmp_path)
    tiers = [[DictTier(Nearness.NVME).put(made, rank)] for rank in range(2)]
    tiers[1][0].flip(5, 1, 5000)
    boxes = [rows(whole.shape, 2, rank, 1) for rank in range(2)]
    states = [{"w": {"x": box.empty(whole.shape, whole.dtype)}} for box in boxes]
    for result in bring_back(tmp_path, states, tiers=tiers):
        assert len(result.mended) == 1
        assert not result.skipped
    for box, state in zip(boxes, states, strict=True):
        assert torch.equal(state["w"]["x"].tensor, box.of(whole))


def test_bytes_passed_on_use_few_windows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    genuine = targets.ReadWindow.of_size

    def spy(nbytes: int) -> targets.ReadWindow:
        taken.append(nbytes)
        return genuine(nbytes)

    monkeypatch.setattr(targets.ReadWindow, "of_size", spy)
    whole, threads, chunk_bytes = numbers((256, 1024)), 4, 4096
    made = checkpoint(lambda _rank: {"w": Weights({"x": whole})}, ranks=2, step=5, chunk_bytes=chunk_bytes)
    tiers = [[DictTier().put(made, rank)] for rank in range(2)]
    boxes = [rows(whole.shape, 2, rank) for rank in range(2)]
    states = [{"w": {"x": box.empty(whole.shape, whole.dtype)}} for box in boxes]
    bring_back(tmp_path, states, tiers=tiers)
    for box, state in zip(boxes, states, strict=True):
        assert torch.equal(state["w"]["x"].tensor, box.of(whole))
    of_readings = 2 * 2 * threads  # the ends first, then the rest, on two ranks
    assert len(taken) <= of_readings + 2 * (_BATCH + _AHEAD)
    assert set(taken) == {chunk_bytes}


def test_names_that_the_state_lacks_are_not_read(tmp_path: Path) -> None:
    publish(tmp_path, 5, {"w": numbers((8, 8)), "ema": numbers((1000, 100))}, chunk_bytes=4096)
    store = CountingStore(tmp_path, request_bytes=4096)
    live = rows((8, 8), 2, 1).empty((8, 8), torch.float32)
    restore({"w": live}, store, LonePeers(), events=None)
    assert torch.equal(live.tensor, numbers((8, 8))[4:])
    assert store.bytes_read < 100_000


class Owner:
    """An object whose state is parts of its tensors."""

    def __init__(self, rank: int) -> None:
        self.weights = nn.Parameter(torch.zeros(2, 8))
        self.rank, self.loaded = rank, False

    def state_dict(self) -> dict[str, Any]:
        return {"experts": [Split(self.weights, (4, 8), (2 * self.rank, 0))], "names": ("a", "b")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert isinstance(state["experts"][0], Split)
        assert state["names"] == ("a", "b")
        self.loaded = True


def test_objects_that_split_by_hand_get_their_parts_filled(tmp_path: Path) -> None:
    whole = numbers((4, 8))
    publish(tmp_path, 5, {"owner": {"experts": [whole], "names": ("a", "b")}})
    states = [{"owner": Owner(rank)} for rank in range(2)]
    bring_back(tmp_path, states)
    for rank, state in enumerate(states):
        assert state["owner"].loaded
        assert torch.equal(state["owner"].weights, whole[2 * rank : 2 * rank + 2])
