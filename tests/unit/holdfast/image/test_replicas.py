"""The replica check: which tensors are watched, which rows are sampled, and which rank is reported as drifted."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import ProtocolError
from holdfast.image.entries import REPLICATED, SPLIT, Entry, TensorInfo
from holdfast.image.layout import Layout
from holdfast.image.regions import Region, unite
from holdfast.image.replicas import (
    ROW_BYTES,
    Divergence,
    ReplicaComparer,
    decode,
    digest,
    drift_of,
    encode,
    first_row,
    stride,
    watched_entries,
)
from holdfast.image.save_record import StepRecord

CHUNK = 4096


def _layout(ranks: int = 3) -> Layout:
    entries = (
        Entry("pickle", 0, 100, 0, ()),
        Entry("w", 128, 400, REPLICATED, ()),
        Entry("buffer", 600, 40, 0, ()),
        Entry("b", 700, 40, REPLICATED, ()),
        Entry("gaps", 800, 80, REPLICATED, ()),
        Entry("empty", 900, 0, REPLICATED, ()),
    )
    tensors = (
        TensorInfo("model/w", "float32", (10, 10), 1),
        TensorInfo("model/tied", "float32, strides (1, 10)", (10, 10), 1),
        TensorInfo("model/seen", "float32", (10,), 2),
        TensorInfo("model/b", "bfloat16", (20,), 3),
        TensorInfo("model/window", "float32", (10,), 4),
        TensorInfo("model/none", "float32", (0,), 5),
    )
    return Layout(CHUNK, CHUNK, ranks, entries, tensors)


def test_only_what_replicated_tensors_fill_is_watched() -> None:
    assert watched_entries(_layout()) == (1, 3)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 1000])
def test_fingerprints_come_back(count: int) -> None:
    crcs = tuple((place * 2654435761) % 2**32 for place in range(count))
    assert decode(encode(crcs), count) == crcs


@pytest.mark.parametrize(
    "text", [None, 5, "", "AAAA", "AAAAAAAAAAA=A", "!!!!!!!!!!!=", "é" * 12, "AAAAAAAAAAAAAAAA"]
)
def test_malformed_fingerprints_are_refused(text: Any) -> None:
    with pytest.raises(ProtocolError, match="DONE: replicas"):
        decode(text, 2)


@pytest.mark.parametrize("every", [1, 2, 17, 1000, 4096])
@pytest.mark.parametrize("nbytes", [100, 64 * 64 * 17, 10**6])
def test_every_row_has_its_turn_whatever_steps_are_saved(nbytes: int, every: int) -> None:
    rows_apart = stride(nbytes)
    looked_at = {first_row(step * every, rows_apart) for step in range(12 * rows_apart)}
    assert looked_at == set(range(rows_apart))
    assert nbytes // ROW_BYTES // rows_apart <= 64


def _compare(values: dict[int, tuple[int, int]]) -> Divergence | None:
    return ReplicaComparer().compare(_layout(max(values) + 1), 7, values)


def test_the_same_is_no_divergence() -> None:
    assert _compare({0: (1, 2), 1: (1, 2), 2: (1, 2)}) is None
    assert _compare({0: (1, 2)}) is None
    assert ReplicaComparer().compare(_layout(), 7, {}) is None


def test_a_majority_says_who_drifted() -> None:
    found = _compare({0: (1, 2), 1: (1, 9), 2: (1, 2)})
    assert found is not None
    assert (found.drifted, found.undecided) == ({1: ["model/b"]}, {})
    assert "step 7" in found.message
    assert "rank 1 differs from most ranks in model/b" in found.message


def test_without_a_majority_all_sides_are_named() -> None:
    found = _compare({0: (1, 2), 1: (3, 2), 2: (1, 2), 3: (3, 2)})
    assert found is not None
    assert (found.drifted, found.undecided) == ({}, {"model/w": [[0, 2], [1, 3]]})
    assert "ranks 0, 2 and ranks 1, 3 differ from each other in model/w" in found.message


def test_each_rank_and_tensor_is_news_once() -> None:
    replicas = ReplicaComparer()
    layout = _layout()

    def news(values: dict[int, tuple[int, int]]) -> bool:
        found = replicas.compare(layout, 1, values)
        assert found is not None
        return replicas.is_new(found)

    assert news({0: (1, 2), 1: (1, 2), 2: (1, 5)})
    assert not news({0: (8, 2), 1: (8, 2), 2: (8, 6)})
    assert news({0: (8, 2), 1: (8, 2), 2: (7, 6)})
    assert news({0: (8, 2), 1: (8, 3), 2: (8, 2)})


# -- what stays of it -------------------------------------------------------------------------------------------


def _layout_of(nbytes: int) -> Layout:
    entry, numel = Entry("w", 0, nbytes, REPLICATED, ()), nbytes // 4
    return Layout(nbytes, CHUNK, 2, (entry,), (TensorInfo("model/w", "float32", (numel,), 0),))


def test_a_sample_that_is_equal_does_not_clear_a_tensor_that_drifted() -> None:
    replicas, layout = ReplicaComparer(), _layout_of(1 << 20)
    assert replicas.compare(layout, 5, {0: (1,), 1: (2,)}) is not None
    assert replicas.compare(layout, 6, {0: (3,), 1: (3,)}) is None, "other rows"
    assert "drifted apart at step 5, in model/w" in replicas.describe_unresolved(6)
    assert replicas.compare(_layout_of(1 << 21), 7, {0: (3,), 1: (3,)}) is None
    assert replicas.describe_unresolved(7), "more room for the pickle is another layout, and proves nothing"


def test_a_tensor_that_was_seen_whole_is_cleared() -> None:
    replicas, layout = ReplicaComparer(), _layout_of(400)
    assert not replicas.describe_unresolved(4)
    assert replicas.compare(layout, 5, {0: (1,), 1: (2,)}) is not None
    assert replicas.describe_unresolved(5)
    assert replicas.compare(layout, 6, {0: (3,)}) is None, "the other rank is lost"
    assert replicas.describe_unresolved(6)
    assert replicas.compare(layout, 7, {0: (3,), 1: (3,)}) is None
    assert not replicas.describe_unresolved(7)


def test_drift_is_what_the_stager_said_or_else_what_the_ranks_did() -> None:
    one, other = digest(encode([1, 2])), digest(encode([1, 3]))
    equal = {"0": {"replicas_digest": one}, "1": {"replicas_digest": one}}
    differ = {**equal, "1": {"replicas_digest": other}, "2": {}}
    assert drift_of(StepRecord.from_json({"ranks": equal}), 7) == ""
    assert drift_of(StepRecord.from_json({"ranks": differ}), 7) == (
        "step 7: replicas have drifted apart: rank 0 and rank 1 differ from each other"
    )
    assert (
        drift_of(StepRecord.from_json({"ranks": equal, "divergence": {"message": "model/w drifted"}}), 7)
        == "model/w drifted"
    )


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"ranks": []},
        {"ranks": {"x": {"replicas_digest": "a"}, "1": {"replicas_digest": "b"}}},
        {"ranks": {"0": 5, "1": {"replicas_digest": "b"}}},
        {"divergence": {"message": 5}},
        {"divergence": "x"},
        {"ranks": {"9" * 5000: {"replicas_digest": "a"}, "1": {"replicas_digest": "b"}}},
    ],
)
def test_a_record_from_outside_says_no_drift_by_accident(record: dict[str, Any]) -> None:
    assert drift_of(StepRecord.from_json(record), 7) == ""


def test_a_drift_text_fits_a_manifest() -> None:
    ranks = {str(rank): {"replicas_digest": str(rank)} for rank in range(3000)}
    assert len(drift_of(StepRecord.from_json({"ranks": ranks}), 7)) < 300
    assert len(drift_of(StepRecord.from_json({"divergence": {"message": "x" * 10_000}}), 7)) <= 4096


def _split_layout(*holders: int) -> Layout:
    """A replicated entry; one split in two parts, held by this many ranks each; one split without replicas."""
    ranks = sum(holders)
    upper, lower = Region((0, 0), (6, 10)), Region((6, 0), (4, 10))
    shared = unite((10, 10), 4, [upper] * holders[0] + [lower] * holders[1])
    alone = unite((10, 10), 4, [upper, *[None] * (ranks - 2), lower])
    entries = (
        Entry("shared", 0, 400, SPLIT, ()),
        Entry("alone", 500, 400, SPLIT - 1, ()),
        Entry("whole", 1000, 40, REPLICATED, ()),
    )
    tensors = (
        TensorInfo("model/shared", "float32", (10, 10), 0),
        TensorInfo("model/alone", "float32", (10, 10), 1),
        TensorInfo("model/whole", "float32", (10,), 2),
    )
    return Layout(CHUNK, CHUNK, ranks, entries, tensors, patterns=(shared, alone))


def test_split_tensors_with_replicas_are_watched_after_the_whole_ones() -> None:
    assert watched_entries(_split_layout(2, 2)) == (2, 0)
    assert watched_entries(_split_layout(1, 1)) == (2,)


def test_a_region_is_compared_among_its_holders_alone() -> None:
    layout, replicas = _split_layout(3, 2), ReplicaComparer()
    same = {0: (7, 1), 1: (7, 1), 2: (7, 1), 3: (7, 2), 4: (7, 2)}
    assert replicas.compare(layout, 5, same) is None, "shards differ, replicas do not"
    found = replicas.compare(layout, 6, {**same, 1: (7, 9), 4: (7, 3)})
    assert found is not None
    assert found.drifted == {1: ["model/shared"]}, "two of three agree"
    assert found.undecided == {"model/shared": [[3], [4]]}
    assert replicas.compare(layout, 7, {**same, 3: (8, 2)}) == Divergence(7, {3: ["model/whole"]}, {})
    assert replicas.describe_unresolved(8).startswith(
        "step 8: replicas have drifted apart at step 7, in model/whole,"
    )
    assert replicas.compare(layout, 8, same) is None
    assert not replicas.describe_unresolved(8), "all of it was looked at again"
