"""Cleanup after a dead writer: removes only files in its intents, and only if the store proves they are its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.checkpoints.intents import Intent, clear_intents, discard_intent, intent_name, undo_intent
from holdfast.checkpoints.publish import writer_id
from holdfast.crc import crc32
from holdfast.image.manifest import manifest_name
from holdfast.store.base import Store, Upload
from holdfast.store.generic import GenericStore
from holdfast.store.posix import PosixStore
from tests.support.checkpoints import manifest_of, small_image

FILE, CHUNK_BYTES = "step-000000007-a002.pt", 4096
DATA = bytes(range(256)) * 20


@pytest.fixture(params=["posix", "generic"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "posix":
        return PosixStore(tmp_path / "run")
    return GenericStore(f"memory://{tmp_path.name}-{tmp_path.stat().st_ino}/run")


def begun(store: Store, attempt: int = 2) -> tuple[str, Upload]:
    """Begin like a flusher: the upload, then the intent."""
    write_id = writer_id(attempt)
    upload = store.begin(FILE, nbytes=len(DATA), chunk_bytes=CHUNK_BYTES, write_id=write_id)
    Intent.to_publish(FILE, upload, nbytes=len(DATA), chunk_bytes=CHUNK_BYTES, write_id=write_id).write(store)
    for part in range(2):
        piece = DATA[part * CHUNK_BYTES : (part + 1) * CHUNK_BYTES]
        upload.write_part(part, [memoryview(piece)], crc32(piece))
    return write_id, upload


def cleared(store: Store, attempt: int = 3, wanted: str = "") -> list[str]:
    """Clean up as the next writer does at its start."""
    store.sweep(lambda own: bool(wanted) and own.startswith(wanted))
    return clear_intents(store, attempt, lambda write_id: write_id == wanted)


def names(store: Store) -> list[str]:
    return [info.name for info in store.list()]


def test_a_file_whose_manifest_was_never_written_goes(store: Store) -> None:
    _, upload = begun(store)
    upload.publish()
    assert cleared(store) == [FILE]
    assert names(store) == []


def test_an_intent_whose_file_never_came_goes_alone(store: Store) -> None:
    begun(store)
    assert cleared(store) == []
    assert names(store) == []


def test_a_file_that_was_listed_stays_though_a_listing_does_not_show_its_manifest(store: Store) -> None:
    """The writer died before it could remove its intent; the store's LIST lags, a lookup by name does not."""
    _, upload = begun(store)
    upload.publish()
    store.write(manifest_name(FILE), b"whatever it says")
    everything = store.list

    def lagging() -> object:
        return [info for info in everything() if info.name != manifest_name(FILE)]

    store.list = lagging  # type: ignore[method-assign,assignment]
    assert cleared(store) == []
    del store.list
    assert names(store) == [manifest_name(FILE), FILE]


def test_a_file_of_which_nothing_was_written_down_is_nobodys_leftover(store: Store) -> None:
    store.write(FILE, DATA)
    store.write("step-000000001.pt", DATA)
    assert cleared(store) == []
    assert names(store) == ["step-000000001.pt", FILE]


def test_a_backup_that_stands_where_a_dead_writer_wanted_to_write_stays(store: Store) -> None:
    begun(store)
    store.write(FILE, DATA)  # of the same size, too
    if isinstance(store, PosixStore):
        assert cleared(store) == []
        assert names(store) == [FILE]


def test_intents_of_other_or_later_writers_are_left(store: Store) -> None:
    write_id, upload = begun(store, attempt=5)
    assert clear_intents(store, 4, lambda _: False) == []
    assert clear_intents(store, 5, lambda _: False) == []
    assert cleared(store, 6, wanted=write_id) == []
    upload.publish()
    assert FILE in names(store)
    assert intent_name(write_id) in names(store)
    discard_intent(store, write_id)
    assert names(store) == [FILE]


def test_a_removal_that_was_begun_is_ended(store: Store) -> None:
    manifest = manifest_of(small_image(), step=7, attempt=2, file=FILE)
    store.write(FILE, bytes(manifest.image_bytes))
    store.write(manifest_name(FILE), manifest.to_bytes())
    Intent.to_remove(manifest).write(store)
    assert cleared(store) == []
    assert manifest_name(FILE) in names(store), "it had not begun"
    store.delete(manifest_name(FILE))  # by the first writer, which was only suspended
    assert cleared(store) == [FILE]
    assert names(store) == []


@pytest.mark.parametrize("write_id", ["../../x", "a/b", "", "x" * 300, "ü", "w000002-ok"])
def test_a_write_id_from_outside_leads_nowhere_else(write_id: str) -> None:
    name = intent_name(write_id)
    assert name.startswith(".holdfast/intent-")
    assert name.count("/") == 1
    assert len(name) < 150


@pytest.mark.parametrize("damage", [b"", b"{}", b"[" * 100_000, b'{"act":"publish"}\n'])
def test_an_intent_that_cannot_be_believed_removes_nothing(store: Store, damage: bytes) -> None:
    write_id, upload = begun(store)
    upload.publish()
    store.write(intent_name(write_id), damage)
    assert cleared(store) == []
    assert undo_intent(store, write_id) == ""
    assert FILE in names(store)


def test_an_intent_under_another_ones_name_removes_nothing(store: Store) -> None:
    write_id, upload = begun(store)
    upload.publish()
    other = intent_name(writer_id(2))
    store.write(other, store.read(intent_name(write_id)))
    discard_intent(store, write_id)
    assert cleared(store) == []
    assert names(store) == [other, FILE]
