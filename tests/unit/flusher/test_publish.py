"""Names and manifests: a good checkpoint is never overwritten, and outside data is not trusted."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from holdfast.checkpoints.publish import (
    FinishedImage,
    ManifestFacts,
    build_manifest,
    candidate_names,
    choose_name,
    publish_manifest,
    writer_attempt,
    writer_id,
)
from holdfast.errors import BusyError
from holdfast.image.best_rule import BestRule
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.entries import REPLICATED, SPLIT, Entry, TensorInfo
from holdfast.image.index import LayoutIndex
from holdfast.image.layout import Layout
from holdfast.image.manifest import Manifest, State, is_manifest_name, manifest_name
from holdfast.image.regions import Region, unite
from holdfast.image.save_record import StepRecord
from tests.support.images import made_up
from tests.support.memory_store import MemoryStore

IMAGE = made_up(2, entries=4, chunk_bytes=4096, ranks=2, entry_bytes_max=9000)


def manifest(file: str, **changes: Any) -> Manifest:
    layout = IMAGE.layout
    job = FinishedImage(
        CheckpointId(1, 7),
        LayoutIndex(layout),
        1,
        tuple(range(layout.chunks)),
        tuple(range(len(layout.entries))),
    )
    made = build_manifest(
        job,
        run="run",
        file=file,
        write_id="w",
        facts=ManifestFacts(
            10.0, 12.5, {"ranks": {"0": {"saved_at_unix": 9.0}, "1": {"saved_at_unix": 9.5}}}
        ),
        writer_record={"write_seconds": 1.0},
    )
    return made.model_copy(update=changes)


def test_manifest_survives_its_own_round_trip_with_all_fields() -> None:
    made = manifest("step-000000007.pt")
    assert Manifest.from_bytes(made.to_bytes(), source="x") == made
    assert (made.pgt1_seconds, made.pgt2_seconds) == (1.0, 3.5)
    assert made.created == "1970-01-01T00:00:12.500+00:00"
    assert [entry.crc32 for entry in made.entries] == [0, 1, 2, 3]
    assert made.record["flusher"] == {"write_seconds": 1.0}
    assert len(made.tensors) == 4


def test_a_manifest_has_the_metrics_of_rank_0_and_the_rule_of_the_writer() -> None:
    layout, rule = IMAGE.layout, BestRule(metric="loss", mode="min")
    record = {"ranks": {"0": {"metrics": {"loss": 0.5}}, "1": {"metrics": {"loss": 0.1}}}}
    crcs = tuple(range(layout.chunks)), tuple(range(len(layout.entries)))
    made = build_manifest(
        FinishedImage(CheckpointId(1, 7), LayoutIndex(layout), 1, *crcs),
        run="run",
        file="step-000000007.pt",
        write_id="w",
        facts=ManifestFacts(10.0, 12.5, record, best=rule),
        writer_record={},
    )
    assert (made.metrics, made.best) == ({"loss": 0.5}, rule)


def test_a_manifest_says_how_tensors_were_split_for_split_ones_only() -> None:
    halves = unite((50, 6), 4, [Region((0, 0), (25, 6)), Region((25, 0), (25, 6))])
    entries = (Entry("archive/data/0", 0, 1200, SPLIT, ()), Entry("archive/data/1", 1200, 40, REPLICATED, ()))
    tensors = (TensorInfo("w", "float32", (50, 6), 0), TensorInfo("b", "float32", (10,), 1))
    layout = Layout(4096, 4096, 2, entries, tensors, patterns=(halves,))
    made = build_manifest(
        FinishedImage(CheckpointId(1, 7), LayoutIndex(layout), 1, (1,), (1, 2)),
        run="run",
        file="step-000000007.pt",
        write_id="w",
        facts=ManifestFacts(10.0, 12.5, {}),
        writer_record={},
    )
    assert [tensor.split for tensor in made.tensors] == [0, None]
    assert [one.describe() for one in made.splits] == ["split in 2 along dim 0"]
    assert Manifest.from_bytes(made.to_bytes(), source="x") == made


def test_only_the_first_attempt_has_plain_names_and_no_attempt_another_ones() -> None:
    store = MemoryStore()
    names = {
        attempt: set(candidate_names(CheckpointId(attempt, 7)))
        for attempt in (1, 2, 3, 12, 999, 1000, 10_000)
    }
    assert choose_name(store, CheckpointId(1, 7), ()) == "step-000000007.pt"
    assert choose_name(store, CheckpointId(3, 7), ()) == "step-000000007-a003.pt"
    assert choose_name(store, CheckpointId(1000, 7), ()) == "step-000000007-a1000.pt"
    for one, other in itertools.combinations(names.values(), 2):
        assert not one & other
    assert all(is_manifest_name(manifest_name(name)) for found in names.values() for name in found)


@pytest.mark.parametrize("what", ["file", "manifest", "both", "of no use"])
def test_a_name_that_is_taken_is_left_alone(what: str) -> None:
    """A late writer of the same attempt, a person's backup, a checkpoint that was found bad: nothing is replaced."""
    store = MemoryStore()
    name = "step-000000007-a003.pt"
    if what != "manifest":
        store.objects[name] = bytes(IMAGE.layout.image_bytes)
    if what != "file":
        store.objects[manifest_name(name)] = manifest(name, state=State.BAD).to_bytes()
    if what == "of no use":
        store.objects[manifest_name(name)] = b"{}"
    assert choose_name(store, CheckpointId(3, 7), ()) == "step-000000007-a0003.pt"
    with pytest.raises(BusyError, match="move away"):
        choose_name(store, CheckpointId(3, 7), {"step-000000007-a0003.pt"})


def test_a_step_is_published_once_per_attempt() -> None:
    store = MemoryStore()
    store.objects["step-000000007.json"] = manifest("step-000000007.pt").to_bytes()
    with pytest.raises(BusyError, match="already published"):
        choose_name(store, CheckpointId(1, 7), ())


def test_a_manifest_is_written_once_and_never_over_another() -> None:
    store = MemoryStore()
    made = manifest("step-000000007.pt")
    assert publish_manifest(store, made) == made
    again = made.model_copy(update={"created": "later"})
    assert publish_manifest(store, again) == made, "the answer to the first try was lost: that one counts"
    with pytest.raises(BusyError, match="stays unlisted"):
        publish_manifest(store, made.model_copy(update={"write_id": "another"}))
    assert Manifest.from_bytes(store.objects["step-000000007.json"], source="x") == made
    store.objects["step-000000007.json"] = b"somebody's"
    with pytest.raises(BusyError, match="something else"):
        publish_manifest(store, made)


def test_a_sweep_knows_whose_an_upload_is() -> None:
    assert writer_attempt(writer_id(7)) == 7
    assert writer_attempt(f"{writer_id(12)}-step-000000001.pt") == 12
    assert writer_attempt("0123456789abcdef0123456789abcdef") == 0, "an older version's tells nothing"
    assert writer_id(7) != writer_id(7)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({}, None),
        ({"ranks": 5}, None),
        ({"ranks": {"0": None, "1": {"saved_at_unix": "1"}, "2": {"saved_at_unix": True}}}, None),
        ({"ranks": {"0": {"saved_at_unix": float("nan")}, "1": {"saved_at_unix": 4}}}, 4.0),
        ({"ranks": {"0": {"saved_at_unix": 6.5}, "1": {"saved_at_unix": 4.5}}}, 4.5),
    ],
)
def test_earliest_save_is_found_in_any_record(record: dict[str, Any], expected: float | None) -> None:
    assert StepRecord.from_json(record).saved_at_unix == expected
