"""Read-back: every flipped bit is found, and named as precisely as possible."""

from __future__ import annotations

import re
import struct
import threading
import zlib
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoints.verification import VerifyReport, verify_file
from holdfast.errors import StoreError
from holdfast.image.manifest import EntryRecord, Manifest
from tests.support.calls import python_calls
from tests.support.checkpoints import (
    CHUNK_BYTES,
    SMALL_TENSORS,
    add,
    add_small,
    manifest_of,
    small_image,
    torch_image,
)
from tests.support.memory_store import MemoryStore

IMAGE = small_image()
MANIFEST = manifest_of(IMAGE, step=1, tensors=SMALL_TENSORS)


def entry(end: str) -> EntryRecord:
    return next(record for record in MANIFEST.entries if record.name.endswith(end))


def verified(
    image: bytes, manifest: Manifest = MANIFEST, threads: int = 2, buffer_bytes: int = 4096
) -> VerifyReport:
    store = MemoryStore()
    add(store, manifest, image)
    return verify_file(store, manifest, threads=threads, buffer_bytes=buffer_bytes)


def flipped(at: int, bit: int = 0) -> bytes:
    image = bytearray(IMAGE)
    image[at] ^= 1 << bit
    return bytes(image)


@pytest.mark.parametrize("chunk_bytes", [4096, 1000, 1 << 20, 7])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_whole_file_is_good(chunk_bytes: int, threads: int) -> None:
    manifest = manifest_of(IMAGE, step=1, tensors=SMALL_TENSORS, chunk_bytes=chunk_bytes)
    report = verified(IMAGE, manifest, threads=threads, buffer_bytes=3000)
    assert report.ok
    assert report.checked_bytes == len(IMAGE)
    assert report.summary().endswith("bytes are as they were written")


def test_a_flip_names_the_tensors_of_that_storage_and_the_bytes() -> None:
    weight = entry("data/0")
    at = weight.offset + 5000
    report = verified(flipped(at))
    assert report.tensors == ("model/weight", "model/tied")
    places = {damage.what: (damage.offset, damage.nbytes) for damage in report.damage}
    chunk = at // CHUNK_BYTES
    assert places == {
        f"chunk {chunk}": (chunk * CHUNK_BYTES, CHUNK_BYTES),
        f"entry {weight.name}": (chunk * CHUNK_BYTES, CHUNK_BYTES),
    }
    said = r"chunk 1 .*model/weight, model/tied.*expected CRC-32 [0-9a-f]{8}, got"
    assert re.search(said, report.summary())


def test_a_flip_between_the_entries_touches_no_tensor() -> None:
    report = verified(flipped(entry("data/1").offset - 1))
    assert not report.ok
    assert report.tensors == ()
    assert "no tensor is touched" in report.summary()


def test_several_flips_name_each() -> None:
    image = bytearray(IMAGE)
    image[entry("data/1").offset] ^= 1
    image[entry("data/2").offset + 5999] ^= 1
    assert verified(bytes(image)).tensors == ("model/bias", "optimizer/moment")


@given(st.integers(0, len(IMAGE) - 1), st.integers(0, 7))
def test_any_flip_is_found_in_its_chunk(at: int, bit: int) -> None:
    report = verified(flipped(at, bit))
    first = report.damage[0]
    assert first.what.startswith("chunk ")
    assert first.offset <= at < first.offset + first.nbytes


@pytest.mark.parametrize("change", [-1, -5000, 1])
def test_a_wrong_size_is_damage_and_nothing_is_read(change: int) -> None:
    image = IMAGE[:change] if change < 0 else IMAGE + b"x"
    report = verified(image)
    assert [damage.what for damage in report.damage] == ["file"]
    assert report.damage[0].nbytes == abs(change)
    assert report.checked_bytes == 0
    if change == -5000:
        assert report.tensors == ("optimizer/moment",)


def test_a_missing_file_is_damage() -> None:
    store = MemoryStore()
    add(store, MANIFEST)
    report = verify_file(store, MANIFEST)
    assert (report.ok, report.damage[0].got) == (False, "no file")


def directory_field(image: bytes, name: str) -> int:
    """Return the offset of the CRC of `name` in the central directory."""
    at = image.rindex(b"PK\x01\x02")
    while (
        struct.unpack_from("<H", image, at + 28)[0] != len(name)
        or image[at + 46 : at + 46 + len(name)] != name.encode()
    ):
        at = image.rindex(b"PK\x01\x02", 0, at)
    return at + 16


def test_a_directory_that_states_another_crc_is_found_although_the_bytes_are_as_written() -> None:
    image = bytearray(IMAGE)
    struct.pack_into("<I", image, directory_field(IMAGE, entry("data/2").name), 0xDEAD)
    entries = MANIFEST.entries
    manifest = manifest_of(bytes(image), step=1, tensors=SMALL_TENSORS, entries=entries)
    report = verified(bytes(image), manifest)
    assert [damage.what for damage in report.damage] == [f"directory of {entry('data/2').name}"]
    assert report.tensors == ("optimizer/moment",)


def test_a_file_that_is_no_zip() -> None:
    image = b"x" * 9000
    fields = {"image_bytes": 9000, "image_crc32": zlib.crc32(image), "entries": (), "tensors": ()}
    sums = tuple(zlib.crc32(image[at : at + CHUNK_BYTES]) for at in range(0, 9000, CHUNK_BYTES))
    manifest = MANIFEST.model_copy(update={**fields, "chunk_crc32s": sums})
    assert [damage.what for damage in verified(image, manifest).damage] == ["directory"]


def test_an_entry_of_the_manifest_that_the_zip_does_not_know() -> None:
    first = MANIFEST.entries[0].model_copy(update={"name": "archive/unknown"})
    manifest = MANIFEST.model_copy(update={"entries": (first, *MANIFEST.entries[1:])})
    assert [damage.got for damage in verified(IMAGE, manifest).damage] == ["no such entry"]


def test_chunks_good_but_an_entry_not_is_the_writers_fault_and_found() -> None:
    wrong = tuple(
        e.model_copy(update={"crc32": 1}) if e.name.endswith("data/1") else e for e in MANIFEST.entries
    )
    report = verified(IMAGE, MANIFEST.model_copy(update={"entries": wrong}))
    bias = entry("data/1")
    assert [(damage.what, damage.offset, damage.nbytes) for damage in report.damage] == [
        (f"entry {bias.name}", bias.offset, bias.nbytes)
    ]


def test_chunks_good_but_the_whole_not() -> None:
    report = verified(IMAGE, MANIFEST.model_copy(update={"image_crc32": 1}))
    assert [damage.what for damage in report.damage] == ["image"]


def test_entries_that_overlap_are_refused() -> None:
    spread = MANIFEST.entries[1].model_copy(update={"offset": MANIFEST.entries[0].offset})
    report = verified(IMAGE, MANIFEST.model_copy(update={"entries": (MANIFEST.entries[0], spread)}))
    assert [damage.what for damage in report.damage] == ["manifest"]


def test_an_entry_without_bytes_is_good() -> None:
    nothing = EntryRecord(name="archive/none", offset=MANIFEST.entries[0].offset, nbytes=0, crc32=0)
    report = verified(IMAGE, MANIFEST.model_copy(update={"entries": (nothing, *MANIFEST.entries)}))
    # Its bytes, of which there are none, are good; only the directory, which does not know it, objects.
    assert [damage.what for damage in report.damage] == ["directory of archive/none"]


def test_progress_adds_up_to_the_file_from_the_calling_thread() -> None:
    store = MemoryStore()
    manifest = add_small(store, 1)
    steps: list[int] = []
    threads: set[int] = set()

    def progress(nbytes: int) -> None:
        steps.append(nbytes)
        threads.add(threading.get_ident())

    assert verify_file(store, manifest, progress=progress).ok
    assert sum(steps) == manifest.image_bytes
    assert len(steps) == len(manifest.chunk_crc32s)
    assert threads == {threading.get_ident()}


class Shrinking(MemoryStore):
    """A store whose file is truncated while it is read."""

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        if offset >= 2 * CHUNK_BYTES:
            self.objects[name] = self.objects[name][:offset]
        super().read_into(name, offset, buffer)


def test_a_file_that_is_cut_meanwhile_is_damage() -> None:
    store = Shrinking()
    manifest = add_small(store, 1)
    report = verify_file(store, manifest)
    assert [damage.what for damage in report.damage] == ["file"]
    assert manifest.file in report.damage[0].got


class Broken(MemoryStore):
    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        raise StoreError("connection reset")


def test_a_store_that_fails_says_nothing_about_the_bytes() -> None:
    store = Broken()
    manifest = add_small(store, 1)
    with pytest.raises(StoreError, match="connection reset"):
        verify_file(store, manifest)


class FailsInLanes(MemoryStore):
    """Counts what it is asked for, in lanes as to S3."""

    url = "s3://test-verification/run"
    asked = 0
    counting = threading.Lock()

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        with self.counting:
            self.asked += 1
        raise StoreError("connection reset")


def test_after_a_failure_those_that_wait_for_a_lane_read_nothing() -> None:
    store = FailsInLanes()
    manifest = manifest_of(IMAGE, step=1, tensors=SMALL_TENSORS, chunk_bytes=max(1, len(IMAGE) // 256))
    add(store, manifest, IMAGE)
    with pytest.raises(StoreError, match="connection reset"):
        verify_file(store, manifest)
    assert 1 <= store.asked <= 8  # of 128 threads, as many as there were lanes


class WrongOnce(MemoryStore):
    """Changes a byte in the first read of each place."""

    def __init__(self) -> None:
        super().__init__()
        self.read_before: set[int] = set()

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        super().read_into(name, offset, buffer)
        if offset not in self.read_before:
            self.read_before.add(offset)
            buffer[0] ^= 1


def test_a_byte_that_is_wrong_only_on_its_way_is_no_damage(caplog: pytest.LogCaptureFixture) -> None:
    store = WrongOnce()
    manifest = add_small(store, 1)
    assert verify_file(store, manifest).ok
    assert len([r for r in caplog.records if "read wrong once" in r.message]) == len(manifest.chunk_crc32s)


def test_reading_back_runs_no_python_function_for_each_tensor() -> None:
    calls = []
    for tensors in (150, 400):
        image = torch_image({str(number): torch.ones(20) for number in range(tensors)})
        manifest = manifest_of(image, step=1, tensors={}, chunk_bytes=1 << 20)
        store = MemoryStore()
        add(store, manifest, image)
        assert verify_file(store, manifest, threads=1).ok
        reading = partial(verify_file, store, manifest, threads=1)
        calls.append(python_calls(reading, of="holdfast/checkpoints"))
    assert calls[0] == calls[1]
