"""Special cases of stores over fsspec; tests/conformance has the common rules."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

from holdfast.crc import crc32
from holdfast.errors import DamageError, StoreError, StoreMissing
from holdfast.store.generic import GenericStore


@pytest.fixture
def store() -> GenericStore:
    return GenericStore(f"memory://{secrets.token_hex(6)}/run")


def test_a_part_whose_bytes_have_changed_is_not_written(store: GenericStore) -> None:
    upload = store.begin("step.pt", nbytes=5, chunk_bytes=4096, write_id="w")
    with pytest.raises(DamageError, match="part 0"):
        upload.write_part(0, [memoryview(b"12345")], crc32(b"12345") ^ 1)
    with pytest.raises(StoreError, match="missing"):
        upload.publish()
    upload.abort()


@pytest.mark.parametrize(
    ("error", "kind", "retriable"),
    [
        (FileNotFoundError("x"), StoreMissing, False),
        (PermissionError("x"), StoreError, False),
        (ConnectionResetError("x"), StoreError, True),
        (TimeoutError("x"), StoreError, True),
        (KeyError("a driver's own"), StoreError, False),
    ],
)
def test_no_driver_error_leaves_the_package(
    store: GenericStore,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    kind: type[StoreError],
    retriable: bool,
) -> None:
    def fail(*_: Any, **__: Any) -> bytes:
        raise error

    store.write("name", b"some")
    monkeypatch.setattr(store._folder._fs, "cat_file", fail)
    with pytest.raises(kind, match=r"memory://") as caught:
        store.read("name")
    assert caught.value.retriable is retriable


def test_a_publish_cut_short_can_be_repeated(store: GenericStore, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = store.begin("step.pt", nbytes=5, chunk_bytes=4096, write_id="w")
    upload.write_part(0, [memoryview(b"12345")], crc32(b"12345"))

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionResetError("cut")

    with monkeypatch.context() as patch:
        patch.setattr(store._folder._fs, "mv", fail)
        with pytest.raises(StoreError, match="cut"):
            upload.publish()
    assert store.list() == []
    upload.publish()
    assert store.read("step.pt") == b"12345"
    assert store.sweep() == []
