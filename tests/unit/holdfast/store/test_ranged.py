"""A stored object read as a file."""

from __future__ import annotations

import io
import os
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import StoreMissing
from holdfast.store.ranged import RangedFile
from tests.support.checkpoints import small_image
from tests.support.memory_store import MemoryStore

DATA = bytes(range(256)) * 4


def ranged(data: bytes = DATA) -> RangedFile:
    store = MemoryStore()
    store.objects["object"] = data
    return RangedFile(store, "object")


moves = st.tuples(st.just("seek"), st.integers(0, 1200), st.just(os.SEEK_SET))
jumps = st.tuples(st.just("seek"), st.integers(-1024, 100), st.just(os.SEEK_END))
reads = st.tuples(st.just("read"), st.integers(0, 600), st.just(0))


@given(st.lists(moves | jumps | reads, max_size=20))
def test_a_ranged_file_behaves_as_any_file_does(actions: list[tuple[str, int, int]]) -> None:
    mine, reference = ranged(), io.BytesIO(DATA)
    for name, number, whence in actions:
        if name == "seek":
            assert mine.seek(number, whence) == reference.seek(number, whence)
        else:
            assert mine.read(number) == reference.read(number)
        assert mine.tell() == reference.tell()


def test_read_all_and_relative_seek() -> None:
    file = ranged()
    file.seek(10)
    file.seek(-4, os.SEEK_CUR)
    assert file.read() == DATA[6:]
    assert file.read() == b""


def test_before_the_start_and_unknown_whence_are_refused() -> None:
    with pytest.raises(ValueError, match="before the start"):
        ranged().seek(-1)
    with pytest.raises(ValueError, match="whence"):
        ranged().seek(0, 7)


def test_a_ranged_file_is_read_only_and_needs_its_object() -> None:
    file = ranged()
    assert (file.readable(), file.seekable(), file.writable()) == (True, True, False)
    with pytest.raises(StoreMissing):
        RangedFile(MemoryStore(), "gone")


def test_zipfile_reads_through_it_raw_and_buffered() -> None:
    for file in (ranged(small_image()), io.BufferedReader(ranged(small_image()))):
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None
            assert archive.read("archive/byteorder") == b"little"
