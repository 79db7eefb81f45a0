"""A machine error says nothing about the file: retried, and never with advice to remove the file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from holdfast.errors import ConfigError, StoreError
from holdfast.ring.directory import open_private_file
from holdfast.ring.ring import Ring
from holdfast.ring.ring_keeper import is_ring_kept

MACHINE = [errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EIO, errno.EROFS]
PLANTED = [errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EACCES]


def refuse(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", fail)


@pytest.mark.parametrize("number", MACHINE)
def test_a_lack_of_the_machine_is_retriable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    refuse(monkeypatch, number)
    with pytest.raises(StoreError) as caught:
        open_private_file(tmp_path / "flush-1-5", os.O_WRONLY | os.O_CREAT)
    assert caught.value.retriable
    assert "remove it" not in str(caught.value)
    assert "flush-1-5" in str(caught.value)


@pytest.mark.parametrize("number", PLANTED)
def test_a_file_that_is_not_as_it_should_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    refuse(monkeypatch, number)
    with pytest.raises(ConfigError, match="remove it"):
        open_private_file(tmp_path / "flush-1-5", os.O_WRONLY | os.O_CREAT)


def test_without_descriptors_a_ring_counts_as_held_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ring.create(tmp_path / "ring", chunk_bytes=4096, ring_chunks=1, attempt=1) as ring:
        assert not ring.is_held()
        with monkeypatch.context() as patch:
            refuse(patch, errno.EMFILE)
            assert ring.is_held()
            assert is_ring_kept(tmp_path / "ring")
        assert not ring.is_held()
