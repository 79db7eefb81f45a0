"""A model of 70 billion parameters with AdamW on 512 simulated ranks: FSDP over 64, each with 8-way tensor
parallelism. Its tensor table goes through the real agreement, and its image is laid out as for a real job.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.image.entries import SPLIT, Entry
from holdfast.image.layout import Layout
from holdfast.image.regions import Region
from holdfast.wire.layout_round import LayoutRound
from holdfast.wire.state_messages import Agreement, HeldRegions, Proposal

__all__ = ["RANKS", "agreed", "layout_of", "tensors"]

SHARDS, PARTS = 64, 8
RANKS = SHARDS * PARTS
_WIDTH, _HIDDEN, _WORDS, _LAYERS = 8192, 28672, 128256, 80
_CHUNK_BYTES = 16 << 20


def tensors() -> Iterator[tuple[str, tuple[int, ...], int | None]]:
    """Yield each tensor's name, shape, and the dimension that tensor parallelism splits."""
    yield "embed", (_WORDS, _WIDTH), 1
    for layer in range(_LAYERS):
        yield f"{layer}.q", (_WIDTH, _WIDTH), 0
        yield f"{layer}.k", (1024, _WIDTH), 0
        yield f"{layer}.v", (1024, _WIDTH), 0
        yield f"{layer}.o", (_WIDTH, _WIDTH), 1
        yield f"{layer}.gate", (_HIDDEN, _WIDTH), 0
        yield f"{layer}.up", (_HIDDEN, _WIDTH), 0
        yield f"{layer}.down", (_WIDTH, _HIDDEN), 1
        yield f"{layer}.norm1", (_WIDTH,), None
        yield f"{layer}.norm2", (_WIDTH,), None
    yield "norm", (_WIDTH,), None
    yield "head", (_WORDS, _WIDTH), 0


def _region_of(shape: tuple[int, ...], part_dimension: int | None, rank: int) -> Region:
    """Return a rank's region: its rows (FSDP) of its part (tensor parallelism) of the tensor."""
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


def agreed() -> tuple[Proposal, Agreement]:
    """Return rank 0's proposal, and the ranks' agreement.

    Raises:
        ValueError: The ranks do not agree.
    """
    rows, specs = [], []
    for kind, dtype, item_bytes in (("model", "bfloat16", 2), ("m", "float32", 4), ("v", "float32", 4)):
        for name, shape, part_dimension in tensors():
            rows.append([f"{kind}/{name}", dtype, list(shape), SPLIT])
            specs.append((shape, part_dimension, item_bytes))
    stager, answer, own = LayoutRound(RANKS, 60.0), None, None
    kinds = {spec: number for number, spec in enumerate(dict.fromkeys(specs))}
    for rank in range(RANKS):
        regions = [_region_of(shape, dimension, rank) for shape, dimension, _ in kinds]
        held = HeldRegions.of((row, spec[2], regions[kinds[spec]]) for row, spec in enumerate(specs))
        proposal = Proposal("digest", rows, 0, {}, held=held)
        own = own or proposal
        answer = stager.propose(rank, proposal, 0.0)
    if own is None or not isinstance(answer, Agreement):
        raise ValueError(f"the ranks do not agree: {answer}")
    return own, answer


def layout_of(answer: Agreement) -> Layout:
    """Lay the image out in chunks of 16 MiB, with room for the file's header and directory."""
    offset, entries = 1 << 20, []
    for row, number in answer.split_rows:
        nbytes = answer.patterns[number].nbytes
        entries.append(Entry(f"archive/data/{row}", offset, nbytes, SPLIT - number, ()))
        offset += nbytes + 128
    return Layout(offset + 4096, _CHUNK_BYTES, RANKS, tuple(entries), patterns=answer.patterns)
