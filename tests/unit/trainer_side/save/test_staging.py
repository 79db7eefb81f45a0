"""A staging area holds exactly this rank's bytes, and no frame is ready before they are there."""

from __future__ import annotations

import itertools
import mmap
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.image.layout import Layout
from holdfast.image.slices import FRAME_ALIGNMENT_BYTES, area_bytes, frames_of
from holdfast.wire.state_messages import Agreement
from tests.support.seeds import each_seed
from trainer_side.save.copy_plan import Route, Router, SlicePlan
from trainer_side.save.staging import CopyEngine, Staging
from trainer_side.state.skeleton import Capture, Skeleton, capture, plan
from trainer_side.state.tensor_table import table
from trainer_side.state.tree import classify, collect
from trainer_side.tiers.first_touch import huge_buffer

CHUNK_BYTES = 4096
RANKS = 3


def _state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.BatchNorm1d(60), torch.nn.Linear(60, 50))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 40)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "note": "plain"}


def _plan(state: dict[str, Any], rank: int, *, chunk_bytes: int = CHUNK_BYTES) -> tuple[Skeleton, Capture]:
    tree = collect(state)
    proposed = table(state, tree, rank=0, ranks=RANKS)
    skeleton = plan(
        tree,
        classify(state, tree),
        rank=rank,
        ranks=RANKS,
        chunk_bytes=chunk_bytes,
        agreed=Agreement(-(-proposed.pickle_bytes // CHUNK_BYTES) * CHUNK_BYTES, {}),
    )
    taken = capture(tree, skeleton)
    assert taken is not None
    return skeleton, taken


def _staging(skeleton: Skeleton) -> Staging:
    slice_plan = SlicePlan.of(skeleton.layout, skeleton.rank, skeleton.gated)
    return Staging(skeleton, slice_plan, CopyEngine(), pinned=False)


def _route(skeleton: Skeleton, taken: Capture, order: Mapping[int, int] | None = None) -> Route:
    router = Router(SlicePlan.of(skeleton.layout, skeleton.rank, skeleton.gated))
    return router.route(taken.sources, lambda: order or {}, order_changed=True)


class Watcher:
    """Records the copy's notifications in order, with the frames that were ready at each."""

    def __init__(self, staging: Staging, skeleton: Skeleton) -> None:
        self.staging, self.skeleton = staging, skeleton
        self.frames = [frame.offset for frame in frames_of(skeleton.layout, skeleton.rank)]
        self.told: list[tuple[str, int, frozenset[int]]] = []

    def ready(self) -> frozenset[int]:
        return frozenset(offset for offset in self.frames if self.staging.is_ready(offset))

    def fill(self, taken: Capture, order: Mapping[int, int] | None = None, *, stop_after: int = -1) -> None:
        def cancelled() -> bool:
            return stop_after >= 0 and sum(what == "passed" for what, _, _ in self.told) >= stop_after

        self.staging.copy_now(taken.sources, taken.contents)
        self.told.append(("taken", 0, self.ready()))
        self.staging.copy_gated(
            taken.sources,
            _route(self.skeleton, taken, order),
            after=None,
            cancelled=cancelled,
            release=lambda storages: self.told.extend(("passed", one, self.ready()) for one in storages),
            on_all_read=lambda: self.told.append(("copied", 0, self.ready())),
        )
        self.told.append(("over", 0, self.ready()))

    def passed(self) -> list[int]:
        return [storage for what, storage, _ in self.told if what == "passed"]


def _fill(staging: Staging, skeleton: Skeleton, taken: Capture) -> Watcher:
    watcher = Watcher(staging, skeleton)
    watcher.fill(taken)
    return watcher


def _expected(layout: Layout, rank: int, taken: Capture, entry: int) -> bytes:
    source = taken.sources[entry]
    return taken.contents[entry] if source is None else bytes(source.bytes().numpy())


@pytest.mark.parametrize("rank", range(RANKS))
def test_an_area_holds_what_this_rank_sends_and_no_more(rank: int) -> None:
    skeleton, taken = _plan(_state(), rank)
    layout = skeleton.layout
    staging = _staging(skeleton)
    _fill(staging, skeleton, taken)
    assert staging.nbytes == layout.slice_bytes(rank)
    offset, entries_seen = 0, set()
    for frame in frames_of(layout, rank):
        assert frame.offset % FRAME_ALIGNMENT_BYTES == 0
        assert not any(staging.view(offset, frame.offset - offset)), (
            "what is written between frames is not zero"
        )
        offset = frame.offset
        for segment in layout.segments(frame.chunk):
            if layout.sender(frame.chunk, segment) != rank:
                continue
            got = bytes(staging.view(offset, segment.nbytes))
            if segment.entry is None:
                want = bytearray(segment.nbytes)
                skeleton.literals.write(segment.offset, memoryview(want))
                assert got == bytes(want)
            else:
                start = segment.offset - layout.entries[segment.entry].offset
                assert got == _expected(layout, rank, taken, segment.entry)[start : start + segment.nbytes]
                entries_seen.add(segment.entry)
            offset += segment.nbytes
    assert staging.area_bytes == area_bytes(layout, rank) == -(-offset // 4096) * 4096
    assert not any(staging.view(offset, staging.area_bytes - offset))
    assert staging.memory.data_ptr() % FRAME_ALIGNMENT_BYTES == 0
    assert entries_seen


def test_frames_become_ready_one_by_one_and_the_last_only_after_the_tensors_are_released() -> None:
    skeleton, taken = _plan(_state(), 1)
    watcher = _fill(_staging(skeleton), skeleton, taken)
    ready = [frames for _, _, frames in watcher.told]
    assert all(before <= after for before, after in itertools.pairwise(ready)), "a frame was taken back"
    assert [what for what, _, _ in watcher.told][-2:] == ["copied", "over"]
    assert len(ready[-2]) == len(watcher.frames) - 1
    assert ready[-1] == frozenset(watcher.frames)
    assert len(set(ready)) > 3, "frames were not given away one by one"


def test_a_frame_is_ready_only_with_the_bytes_of_this_checkpoint() -> None:
    """At the moment when a frame is reported ready, it has its final bytes."""
    state = _state()
    skeleton, taken = _plan(state, 1)
    staging = _staging(skeleton)
    _fill(staging, skeleton, taken)
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.add_(1.0)
    frames = Watcher(staging, skeleton).frames
    ends = [*frames[1:], staging.area_bytes]
    seen: dict[int, bytes] = {}

    def look(*_: object) -> None:
        for offset, end in zip(frames, ends, strict=True):
            if staging.is_ready(offset) and offset not in seen:
                seen[offset] = bytes(staging.view(offset, end - offset))

    staging.copy_now(taken.sources, taken.contents)
    look()
    route = _route(skeleton, taken)
    staging.copy_gated(
        taken.sources, route, after=None, cancelled=lambda: False, release=look, on_all_read=look
    )
    look()
    for offset, end in zip(frames, ends, strict=True):
        assert seen[offset] == bytes(staging.view(offset, end - offset))


def test_layers_are_copied_in_the_order_of_their_updates_and_given_free_one_by_one() -> None:
    skeleton, taken = _plan(_state(), 1)
    staging = _staging(skeleton)
    held = _route(skeleton, taken).storages
    assert held
    wanted = sorted(held, reverse=True)
    watcher = Watcher(staging, skeleton)
    watcher.fill(taken, {storage: place for place, storage in enumerate(wanted)})
    assert watcher.passed() == wanted
    unknown = Watcher(staging, skeleton)
    unknown.fill(taken, {wanted[3]: 0})
    assert unknown.passed()[0] == wanted[3]
    assert sorted(unknown.passed(), reverse=True) == wanted


def test_a_cancelled_copy_never_says_it_is_complete() -> None:
    skeleton, taken = _plan(_state(), 1)
    watcher = Watcher(_staging(skeleton), skeleton)
    watcher.fill(taken, stop_after=2)
    assert len(watcher.passed()) == 2
    assert [what for what, _, _ in watcher.told].count("copied") == 1, (
        "the tensors are given back all the same"
    )
    assert watcher.told[-1][2] < frozenset(watcher.frames)
    assert not watcher.staging.is_complete()


def test_the_next_checkpoint_starts_from_nothing() -> None:
    skeleton, taken = _plan(_state(), 1)
    watcher = _fill(_staging(skeleton), skeleton, taken)
    watcher.staging.copy_now(taken.sources, taken.contents)
    assert len(watcher.ready()) < len(watcher.frames)
    assert not watcher.staging.is_complete()


@pytest.mark.parametrize("chunk_bytes", [CHUNK_BYTES, 1 << 20], ids=["frames", "no frames"])
def test_an_area_is_complete_once_its_copy_is_over(chunk_bytes: int) -> None:
    skeleton, taken = _plan(_state(), 1, chunk_bytes=chunk_bytes)
    assert bool(frames_of(skeleton.layout, 1)) == (chunk_bytes == CHUNK_BYTES)
    staging = _staging(skeleton)
    staging.copy_now(taken.sources, taken.contents)
    assert not staging.is_complete()
    staging.copy_gated(
        taken.sources,
        _route(skeleton, taken),
        after=None,
        cancelled=lambda: False,
        release=lambda _: None,
        on_all_read=lambda: None,
    )
    assert staging.is_complete()


def _swap(model: Any, chance: random.Random) -> None:
    """Swap the memory of two buffers."""
    one, other = chance.sample(model, 2)
    one.data, other.data = other.data, one.data


def _relocate(model: Any, chance: random.Random) -> None:
    """Move a buffer to other memory, and to another offset in its storage."""
    buffer = chance.choice(model)
    buffer.data = torch.randn(buffer.numel() + 8)[chance.randrange(8) :][: buffer.numel()]


def _fill_in_place(model: Any, chance: random.Random) -> None:
    chance.choice(model).normal_()


@each_seed(4)
def test_a_copy_made_at_once_is_taken_from_where_the_state_lies_now(seed: int) -> None:
    """One area holds many checkpoints, between which buffers may move: it always has the present one's bytes."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    state = _state()
    state["model"] = torch.nn.Sequential(*[torch.nn.BatchNorm1d(30) for _ in range(6)])
    state["optimizer"] = torch.optim.SGD(state["model"].parameters())
    buffers = [buffer for buffer in state["model"].buffers() if buffer.numel() == 30]
    skeleton, _ = _plan(state, 0)
    staging = _staging(skeleton)
    plan_of_slice = SlicePlan.of(skeleton.layout, 0, skeleton.gated)
    for count in range(30):
        chance.choice([_swap, _relocate, _fill_in_place, _fill_in_place])(buffers, chance)
        state["note"] = f"{count:05}"
        taken = capture(collect(state), skeleton)
        assert taken is not None
        # The area's earlier content must be gone.
        for piece in plan_of_slice.now:
            staging.view(piece.offset, piece.nbytes)[:] = b"\xff" * piece.nbytes
        staging.copy_now(taken.sources, taken.contents)
        for piece in plan_of_slice.now:
            expected = _expected(skeleton.layout, 0, taken, piece.entry)
            found = bytes(staging.view(piece.offset, piece.nbytes))
            assert found == expected[piece.entry_offset : piece.entry_offset + piece.nbytes], (count, piece)


_PAGE_BYTES = 2 << 20


@pytest.mark.parametrize("nbytes", [1, 4097, 3 * _PAGE_BYTES])
def test_a_huge_buffer_is_zero_and_holds_what_is_written(nbytes: int) -> None:
    buffer = huge_buffer(nbytes)
    assert (buffer.dtype, tuple(buffer.shape)) == (torch.uint8, (nbytes,))
    assert not buffer.any()
    buffer.fill_(7)
    assert bytes(buffer.numpy().data) == b"\x07" * nbytes


def test_a_huge_buffer_is_touched_throughout() -> None:
    buffer = huge_buffer(8 * _PAGE_BYTES)
    mapping = _mapping(buffer.data_ptr())
    assert int(mapping["Rss"]) * 1024 >= buffer.numel()
    if "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        assert int(mapping["AnonHugePages"]) * 1024 >= buffer.numel() - 2 * _PAGE_BYTES


def test_a_kernel_without_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr("trainer_side.tiers.first_touch.mmap.mmap", Plain)
    assert not huge_buffer(_PAGE_BYTES).any()


def _mapping(address: int) -> dict[str, str]:
    """Return the kernel's facts about the mapping with this address, sizes in KiB."""
    found: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        begins = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if begins:
            inside = int(begins[1], 16) <= address < int(begins[2], 16)
        elif inside:
            name, value = line.split(":", 1)
            found[name] = value.split()[0]
    return found
