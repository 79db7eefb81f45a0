"""The staging buffer holds exactly this rank's bytes, and the watermark never runs ahead of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.layout import Layout
from trainer_side.skeleton import Capture, Skeleton, capture, plan, table
from trainer_side.staging import Staging
from trainer_side.state import classify, collect

CHUNK_BYTES = 4096
RANKS = 3


def _state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.BatchNorm1d(60), torch.nn.Linear(60, 50))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 40)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "note": "plain"}


def _plan(state: dict[str, Any], rank: int) -> tuple[Skeleton, Capture]:
    tree = collect(state)
    proposed = table(state, tree, rank=0, ranks=RANKS)
    skeleton = plan(
        tree,
        classify(state, tree),
        rank=rank,
        ranks=RANKS,
        chunk_bytes=CHUNK_BYTES,
        pickle_reserve_bytes=-(-proposed.pickle_bytes // CHUNK_BYTES) * CHUNK_BYTES,
        per_rank_reserve_bytes={},
    )
    taken = capture(tree, skeleton)
    assert taken is not None
    return skeleton, taken


def _fill(staging: Staging, taken: Capture) -> list[int]:
    """Copy everything; what the watermark was each time it was looked at."""
    marks: list[int] = []

    def look() -> bool:
        marks.append(staging.ready_bytes())
        return False

    staging.copy_now(taken.sources, taken.contents)
    staging.copy_gated(
        taken.sources, after=None, cancelled=look, copied=lambda: marks.append(staging.ready_bytes())
    )
    return [*marks, staging.ready_bytes()]


def _expected(layout: Layout, rank: int, taken: Capture, entry: int) -> bytes:
    source = taken.sources[entry]
    return taken.contents[entry] if source is None else bytes(source.bytes().numpy())


@pytest.mark.parametrize("rank", range(RANKS))
def test_it_holds_what_this_rank_sends_and_no_more(rank: int) -> None:
    skeleton, taken = _plan(_state(), rank)
    layout = skeleton.layout
    staging = Staging(skeleton, rank, skeleton.gated, pinned=False)
    _fill(staging, taken)
    assert staging.nbytes == layout.slice_bytes(rank)
    offset, entries_seen = 0, set()
    for chunk, _ in layout.sends(rank):
        for segment in layout.segments(chunk):
            if layout.sender(chunk, segment) != rank:
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
    assert offset == staging.nbytes
    assert entries_seen


def test_the_last_byte_is_given_only_after_the_tensors_are_released() -> None:
    skeleton, taken = _plan(_state(), 1)
    staging = Staging(skeleton, 1, skeleton.gated, pinned=False)
    marks = _fill(staging, taken)
    assert marks == sorted(marks)
    assert marks[-2] < staging.nbytes
    assert marks[-1] == staging.nbytes


def test_a_cancelled_copy_never_says_it_is_complete() -> None:
    skeleton, taken = _plan(_state(), 1)
    staging = Staging(skeleton, 1, skeleton.gated, pinned=False)
    staging.copy_now(taken.sources, taken.contents)
    released: list[bool] = []
    staging.copy_gated(
        taken.sources, after=None, cancelled=lambda: True, copied=lambda: released.append(True)
    )
    assert released == [True]
    assert staging.ready_bytes() < staging.nbytes


def test_the_next_checkpoint_starts_from_nothing() -> None:
    skeleton, taken = _plan(_state(), 1)
    staging = Staging(skeleton, 1, skeleton.gated, pinned=False)
    _fill(staging, taken)
    staging.copy_now(taken.sources, taken.contents)
    assert staging.ready_bytes() < staging.nbytes
