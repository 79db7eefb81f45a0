"""Planning for a model of 70 billion parameters on 512 ranks (FSDP 64 × tensor parallelism 8), with ranks that are not
there: what it takes is counted, in objects and in bytes.
"""

from __future__ import annotations

import gc
import itertools
import math
import tracemalloc
from collections.abc import Iterator

import pytest

from holdfast.image.entries import SPLIT, Entry
from holdfast.image.layout import Layout
from holdfast.image.regions import Comb, Extent, Region
from holdfast.image.slices import frames_of
from holdfast.wire.agreement import Round
from holdfast.wire.frames import decode
from holdfast.wire.held_regions import HeldRegions
from holdfast.wire.state_messages import Agreement, Proposal

SHARDS, PARTS = 64, 8
RANKS = SHARDS * PARTS
WIDTH, HIDDEN, WORDS, LAYERS = 8192, 28672, 128256, 80
CHUNK_BYTES = 16 << 20
PROCESS_BYTES_MAX = 200 << 20
PATTERNS_MAX = 20


def tensors() -> Iterator[tuple[str, tuple[int, ...], int | None]]:
    """Name, shape, and the dimension that tensor parallelism cuts."""
    yield "embed", (WORDS, WIDTH), 1
    for layer in range(LAYERS):
        yield f"{layer}.q", (WIDTH, WIDTH), 0
        yield f"{layer}.k", (1024, WIDTH), 0
        yield f"{layer}.v", (1024, WIDTH), 0
        yield f"{layer}.o", (WIDTH, WIDTH), 1
        yield f"{layer}.gate", (HIDDEN, WIDTH), 0
        yield f"{layer}.up", (HIDDEN, WIDTH), 0
        yield f"{layer}.down", (WIDTH, HIDDEN), 1
        yield f"{layer}.norm1", (WIDTH,), None
        yield f"{layer}.norm2", (WIDTH,), None
    yield "norm", (WIDTH,), None
    yield "head", (WORDS, WIDTH), 0


def region_of(shape: tuple[int, ...], part_dimension: int | None, rank: int) -> Region:
    """What a rank holds: its part of the tensor, and of that its rows."""
    shard, part = divmod(rank, PARTS)
    start, size = [0] * len(shape), [*shape]
    if part_dimension is not None:
        size[part_dimension] //= PARTS
        start[part_dimension] = part * size[part_dimension]
    rows = -(-size[0] // SHARDS)
    first, end = (min(size[0], rows * which) for which in (shard, shard + 1))
    start[0] += first
    size[0] = end - first
    return Region(tuple(start), tuple(size))


@pytest.fixture(scope="module", name="agreement")
def _agreement() -> tuple[Proposal, Agreement]:
    rows, specs = [], []
    for kind, dtype, item_bytes in (("model", "bfloat16", 2), ("m", "float32", 4), ("v", "float32", 4)):
        for name, shape, part_dimension in tensors():
            rows.append([f"{kind}/{name}", dtype, list(shape), SPLIT])
            specs.append((shape, part_dimension, item_bytes))
    stager, answer, own = Round(RANKS, 60.0), None, None
    kinds = {spec: number for number, spec in enumerate(dict.fromkeys(specs))}
    for rank in range(RANKS):
        regions = [region_of(shape, dimension, rank) for shape, dimension, _ in kinds]
        held = HeldRegions.of((row, spec[2], regions[kinds[spec]]) for row, spec in enumerate(specs))
        proposal = Proposal("digest", rows, 0, {}, held=held)
        own = own or proposal
        answer = stager.propose(rank, proposal, 0.0)
    assert isinstance(answer, Agreement), answer
    assert own is not None
    return own, answer


def test_the_ranks_agree_on_few_patterns(agreement: tuple[Proposal, Agreement]) -> None:
    own, answer = agreement
    assert len(answer.split_rows) == len(own.table) > 2000
    assert len(answer.patterns) < PATTERNS_MAX
    assert Agreement.from_frame(decode(answer.to_frame(1))) == answer


def layout_of(answer: Agreement) -> Layout:
    offset, entries = 1 << 20, []
    for row, number in answer.split_rows:
        nbytes = answer.patterns[number].nbytes
        entries.append(Entry(f"archive/data/{row}", offset, nbytes, SPLIT - number, ()))
        offset += nbytes + 128
    return Layout(offset + 4096, CHUNK_BYTES, RANKS, tuple(entries), patterns=answer.patterns)


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
    assert (
        held * 7 // 8 <= sent <= held + literals
    )  # what eight ranks hold alike, the norms, one of them sends
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
