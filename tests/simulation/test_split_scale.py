"""Planning for a model of 70 billion parameters on 512 simulated ranks (FSDP 64 × tensor parallelism 8): the cost is
counted in objects and bytes.
"""

from __future__ import annotations

import gc
import itertools
import math
import tracemalloc

import pytest

from benchmarks.large_model import RANKS, agreed, layout_of, tensors
from holdfast.image.entries import Extent
from holdfast.image.regions import Comb
from holdfast.image.slices import frames_of
from holdfast.wire.frames import decode
from holdfast.wire.state_messages import Agreement, Proposal

PROCESS_BYTES_MAX = 200 << 20
PATTERNS_MAX = 20


@pytest.fixture(scope="module", name="agreement")
def _agreement() -> tuple[Proposal, Agreement]:
    return agreed()


def test_the_ranks_agree_on_few_patterns(agreement: tuple[Proposal, Agreement]) -> None:
    own, answer = agreement
    assert len(answer.split_rows) == len(own.table) > 2000
    assert len(answer.patterns) < PATTERNS_MAX
    assert Agreement.from_frame(decode(answer.to_frame(1))) == answer


def test_a_rank_plans_its_slice_without_an_object_for_each_run_of_the_image(
    agreement: tuple[Proposal, Agreement],
) -> None:
    frame = agreement[1].to_frame(1)
    tracemalloc.start()
    try:
        layout = layout_of(Agreement.from_frame(decode(frame)))
        frames = frames_of(layout, 77)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < PROCESS_BYTES_MAX
    assert sum(map(math.prod, (tensor[1] for tensor in tensors()))) > 70e9
    held = sum(
        layout.patterns[n].combs[layout.patterns[n].region_of[77]].nbytes for _, n in agreement[1].split_rows
    )
    sent = sum(extent.nbytes for one in frames for extent in one.extents)
    literals = sum(layout.chunk_extent(chunk).nbytes for chunk in layout.slice_chunks(77))
    # Eight ranks hold replicas of the norms, and one of them sends.
    assert held * 7 // 8 <= sent <= held + literals
    combs = [comb for pattern in layout.patterns for comb in pattern.combs]
    assert len(combs) < PATTERNS_MAX * RANKS
    gc.collect()
    assert sum(type(one) is Comb for one in gc.get_objects()) < 3 * PATTERNS_MAX * RANKS
    runs = sum(len(one.extents) for one in frames)
    assert sum(type(one) is Extent for one in gc.get_objects()) < 2 * runs + layout.chunks


def test_the_stager_finds_the_senders_of_any_chunk(agreement: tuple[Proposal, Agreement]) -> None:
    layout = layout_of(agreement[1])
    for chunk in itertools.islice(range(layout.chunks), 0, None, layout.chunks // 40):
        extent = layout.chunk_extent(chunk)
        sent = [piece for rank in layout.senders(chunk) for piece in layout.pieces(chunk, rank)]
        assert sum(piece.nbytes for piece in sent) == extent.nbytes
