"""Restores of several ranks into tensors on the device: replicas and parts, in sections, as exact as one by one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from holdfast.errors import DamageError
from tests.late.control import LateMachine
from tests.late.test_restores import HOW, leaves, state_of
from tests.support.restoring import CountingStore, Ranks, ThreadPeers, publish
from tests.support.slices import Checkpoint, DictTier, checkpoint
from tests.unit.trainer_side.restore.test_restore_dtensors import Net, as_rank, trained
from tests.unit.trainer_side.restore.test_restore_split import Box, Weights, numbers, rows, scenes
from trainer_side.ranks.peers import LonePeers
from trainer_side.restore import device_memory, device_sections
from trainer_side.restore.device_sections import DeviceSections, SectionPart, SectionWindow
from trainer_side.restore.restore import restore
from trainer_side.restore.restore_attempt import RestoreOptions
from trainer_side.save.host_memory import locked_buffer
from trainer_side.state.split_tensor import Split

pytestmark = pytest.mark.late("lazy", "dice:1")
PLACES = pytest.mark.parametrize("place", ["tier", "store"])
CHUNK_BYTES = 1 << 16


class Sent(NamedTuple):
    """One section: its number of pieces, and the part of the window that they span."""

    parts: int
    nbytes: int
    is_whole: bool


@contextmanager
def sections() -> Iterator[list[Sent]]:
    """Collect every section that is sent to the device in the block."""
    sent: list[Sent] = []
    genuine = DeviceSections.send

    def send(way: DeviceSections, window: SectionWindow, parts: Sequence[SectionPart]) -> None:
        assert window.section.is_pinned()
        genuine(way, window, parts)
        if parts:
            is_whole = len(parts) >= device_sections._WHOLE_FROM or any(part.runs > 1 for part in parts)
            nbytes = max(part.end for part in parts) - min(part.begin for part in parts)
            sent.append(Sent(len(parts), nbytes, is_whole))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DeviceSections, "send", send)
        yield sent


class Job:
    """Ranks that restore one checkpoint, each from its own tier or all from the store."""

    def __init__(self, made: Checkpoint, place: str, folder: Path, *, ranks: int = 2) -> None:
        self.made, self.folder, self.ranks = made, folder, ranks
        self.tiers: list[list[Any]] = [[] for _ in range(ranks)]
        if place == "tier":
            self.tiers = [[DictTier()] for _ in range(ranks)]
            for saved_rank in range(made.layout.ranks):
                self.tiers[saved_rank % ranks][0].put(made, saved_rank)
        else:
            made.publish(folder)

    def bring_back(
        self,
        states: Sequence[dict[str, Any]],
        *,
        locked: bool = True,
        flip: Callable[[int, memoryview], None] | None = None,
    ) -> None:
        store = CountingStore(self.folder, request_bytes=1 << 13)

        def work(peers: ThreadPeers) -> None:
            options = RestoreOptions(allocate_pinned=locked_buffer if locked else None)
            tiers = self.tiers[peers.rank]
            assert restore(states[peers.rank], store, peers, events=None, tiers=tiers, options=options)

        Ranks(self.ranks, flip=flip).run(work)


@PLACES
@pytest.mark.parametrize("how", [HOW[0], HOW[2]], ids=str)
def test_replicas_get_the_bits_of_loading_tensor_by_tensor(
    place: str, how: dict[str, Any], tmp_path: Path
) -> None:
    made = checkpoint(lambda _: state_of(7, "cpu", how, steps=2), ranks=2, step=3, chunk_bytes=CHUNK_BYTES)
    job = Job(made, place, tmp_path)
    mine, reference = ([state_of(99, "cuda", how, steps=1) for _ in range(2)] for _ in range(2))
    with sections() as sent:
        job.bring_back(mine)
    assert max(section.parts for section in sent) >= device_sections._WHOLE_FROM
    job.bring_back(reference, locked=False)
    for one, other in zip(mine, reference, strict=True):
        assert leaves(one) == leaves(other)
        one["optimizer"].step()


def _on_device(box: Box, whole: torch.Tensor) -> Split:
    """Memory for a part, filled with other values."""
    return Split(torch.full(box.size, 77, device="cuda").to(whole.dtype), whole.shape, box.start)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenes(), st.sampled_from(["tier", "store"]))
def test_a_rank_restores_any_part_of_any_tensor_on_a_device(scene: Any, place: str) -> None:
    whole, ranks, boxes, chunk_bytes = scene
    states: list[dict[str, Any]] = []
    for rank in range(ranks):
        live = {
            name: torch.zeros_like(tensor, device="cuda") if box is None else _on_device(box, tensor)
            for name, tensor in whole.items()
            for box in [boxes[name][rank]]
        }
        states.append({"split": live, "y": torch.zeros(5, device="cuda")})
    made = checkpoint(
        lambda _: {"split": Weights(whole), "y": torch.arange(5.0)}, ranks=2, step=5, chunk_bytes=chunk_bytes
    )
    with tempfile.TemporaryDirectory() as root:
        Job(made, place, Path(root), ranks=ranks).bring_back(states)
    for rank, state in enumerate(states):
        assert torch.equal(state["y"].cpu(), torch.arange(5.0))
        for name, tensor in whole.items():
            live, box = state["split"][name], boxes[name][rank]
            expected = tensor if box is None else box.of(tensor)
            assert torch.equal((live if box is None else live.tensor).cpu(), expected)


@PLACES
@pytest.mark.parametrize("dimension", [0, 1], ids=["rows", "columns"])
def test_parts_cross_in_one_transfer_for_each_section(
    place: str, dimension: int, tmp_path: Path, late: LateMachine
) -> None:
    """No pageable memory; a few transfers, launches and waits for each section, none for each tensor."""
    count, shape = 120, (16, 64)
    whole = {f"w{number}": numbers(shape, seed=number) for number in range(count)}
    made = checkpoint(lambda _: {"model": Weights(whole)}, ranks=2, step=5, chunk_bytes=CHUNK_BYTES)
    job = Job(made, place, tmp_path)
    boxes = [rows(shape, 2, rank, dimension) for rank in range(2)]

    def states() -> list[dict[str, Any]]:
        return [{"model": {name: _on_device(box, tensor) for name, tensor in whole.items()}} for box in boxes]

    job.bring_back(states())  # mapping memory for the first time waits for the device
    mine = states()
    torch.cuda.synchronize()
    names = "cudaMemcpyAsync", "cudaLaunchKernel", "host_waits", "pageable_copies"
    before = [late.count(name) for name in names]
    with sections() as sent:
        job.bring_back(mine)
    torch.cuda.synchronize()
    copies, launches, waits, pageable = (
        late.count(name) - had for name, had in zip(names, before, strict=True)
    )
    for box, state in zip(boxes, mine, strict=True):
        for name, tensor in whole.items():
            assert torch.equal(state["model"][name].tensor.cpu(), box.of(tensor))
    assert pageable == 0
    assert len(sent) <= 2 * (2 * made.layout.chunks)  # two ranks: bytes read, and bytes received
    assert waits <= len(sent) + 2 + 1  # for a window that is sent; at the end; the test's own
    if dimension == 0:
        assert copies <= sum(1 if section.is_whole else section.parts for section in sent)
        assert launches < count, (launches, sent)


@PLACES
def test_a_rank_without_room_brings_all_ranks_what_they_get_without_sections(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = checkpoint(lambda _: state_of(7, "cpu", {}, steps=1), ranks=2, step=3, chunk_bytes=CHUNK_BYTES)
    job = Job(made, place, tmp_path)
    mine, reference = ([state_of(99, "cuda", {}, steps=0) for _ in range(2)] for _ in range(2))
    answers = iter([True, False])
    monkeypatch.setattr(device_memory, "_has_room", lambda *_: next(answers))
    with sections() as sent:
        job.bring_back(mine)
    assert not sent
    job.bring_back(reference, locked=False)
    assert [leaves(one) for one in mine] == [leaves(one) for one in reference]


@PLACES
@pytest.mark.parametrize("split", [False, True], ids=["replicas", "parts"])
def test_a_bit_that_flips_between_the_ranks_is_never_loaded(place: str, split: bool, tmp_path: Path) -> None:
    whole = numbers((64, 256))
    made = checkpoint(lambda _: {"w": Weights({"x": whole})}, ranks=2, step=5, chunk_bytes=CHUNK_BYTES)
    job = Job(made, place, tmp_path)
    bytes_of_it = whole.numpy().tobytes()

    def flip(_rank: int, memory: memoryview) -> None:
        # Parcels from the store hold columns.
        is_tensor = bytes(memory[:1000]) in bytes_of_it or (split and place == "store")
        if memory.nbytes > 2000 and is_tensor:
            memory[1999] ^= 1

    def live(rank: int) -> Any:
        if split:
            return {"x": _on_device(rows(whole.shape, 2, rank, 1), whole)}
        return Weights({"x": torch.full_like(whole, 77)}).cuda()

    states: list[dict[str, Any]] = [{"w": live(rank)} for rank in range(2)]
    with pytest.raises(DamageError, match="after the exchange among the ranks"):
        job.bring_back(states, flip=flip)
    for state in states:
        value = state["w"]["x"].tensor if split else state["w"].x
        assert bool((value == 77).all())


@pytest.mark.parametrize("stepped", [False, True], ids=["before its first step", "with moments"])
def test_parts_of_dtensors(stepped: bool, tmp_path: Path) -> None:
    """Each rank of a mesh in turn; entries that the optimizer has no moments for are read where they stay."""
    net, optimizer = trained(even=True)
    publish(tmp_path, 5, {"model": net.state_dict(), "optimizer": optimizer.state_dict()}, chunk_bytes=4096)

    def bring_back(rank: int, *, locked: bool) -> tuple[dict[str, bytes], list[Sent]]:
        torch.manual_seed(2)
        live = Net(even=True).cuda()
        fully_shard(live, mesh=init_device_mesh("cuda", (4,)))
        moments = torch.optim.AdamW(live.parameters(), lr=0.5)
        if stepped:
            for parameter in live.parameters():
                parameter.grad = torch.ones_like(parameter)
            moments.step()
        options = RestoreOptions(allocate_pinned=locked_buffer if locked else None)
        with sections() as sent:
            restore(
                {"model": live, "optimizer": moments},
                CountingStore(tmp_path),
                LonePeers(),
                events=None,
                options=options,
            )
        found: dict[str, bytes] = {}
        for name, tensor in live.state_dict().items():
            found[name] = _bytes(tensor)
        for number, parameter in enumerate(live.parameters()):
            for key in ("exp_avg", "exp_avg_sq"):
                moment = moments.state[parameter][key]
                assert isinstance(moment, DTensor)
                assert moment.device.type == "cuda"
                found[f"{number}/{key}"] = _bytes(moment)
        return found, sent

    for rank in range(4):
        with as_rank(rank):
            mine, sent = bring_back(rank, locked=True)
            assert sum(section.parts for section in sent) >= sum(map(bool, mine.values()))
            reference, none = bring_back(rank, locked=False)
        assert not none
        assert mine == reference


def _bytes(tensor: torch.Tensor) -> bytes:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
