"""Names and manifests: what is good is never overwritten, and what comes from outside is not believed."""

from __future__ import annotations

from typing import Any

import pytest

from flusher.steps import Publish
from holdfast.checkpoints.publish import ManifestFacts, Times, build_manifest, choose_name, saved_at_unix
from holdfast.errors import BusyError
from holdfast.image.index import LayoutIndex
from holdfast.image.manifest import Key, Manifest, State
from tests.support.images import made_up
from tests.support.memory_store import MemoryStore

IMAGE = made_up(2, entries=4, chunk_bytes=4096, ranks=2, entry_bytes_max=9000)


def manifest(file: str, **changes: Any) -> Manifest:
    layout = IMAGE.layout
    job = Publish(
        Key(1, 7), LayoutIndex(layout), 1, tuple(range(layout.chunks)), tuple(range(len(layout.entries)))
    )
    made = build_manifest(
        job,
        run="run",
        file=file,
        write_id="w",
        facts=ManifestFacts(
            Times(10.0, 12.5), {"ranks": {"0": {"saved_at_unix": 9.0}, "1": {"saved_at_unix": 9.5}}}
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


def test_names_already_taken_get_the_attempt_and_then_no_name_at_all() -> None:
    store = MemoryStore()
    plain, suffixed = "step-000000007.pt", "step-000000007-a003.pt"
    assert choose_name(store, Key(3, 7), ()) == plain
    assert choose_name(store, Key(3, 7), {plain}) == suffixed
    store.objects[plain] = bytes(IMAGE.layout.image_bytes)
    assert choose_name(store, Key(3, 7), ()) == plain  # a file without a manifest is no checkpoint
    store.objects["step-000000007.json"] = manifest(plain).to_bytes()
    assert choose_name(store, Key(3, 7), ()) == suffixed
    with pytest.raises(BusyError, match="already published"):
        choose_name(store, Key(3, 7), {suffixed})


@pytest.mark.parametrize("what", ["bad", "damaged", "file gone", "file short"])
def test_a_name_whose_checkpoint_is_of_no_use_may_be_taken(what: str) -> None:
    store = MemoryStore()
    plain = "step-000000007.pt"
    store.objects[plain] = bytes(IMAGE.layout.image_bytes)
    store.objects["step-000000007.json"] = manifest(plain).to_bytes()
    if what == "bad":
        store.objects["step-000000007.json"] = manifest(plain, state=State.BAD).to_bytes()
    elif what == "damaged":
        store.objects["step-000000007.json"] = b"{}"
    elif what == "file gone":
        del store.objects[plain]
    else:
        store.objects[plain] = b""
    assert choose_name(store, Key(3, 7), ()) == plain


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
    assert saved_at_unix(record) == expected
