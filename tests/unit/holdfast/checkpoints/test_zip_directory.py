"""The fast reader of plain zip directories returns the same as `zipfile`, and None for all others."""

from __future__ import annotations

import io
import struct
import zipfile
from functools import partial

import torch

from holdfast.checkpoints.zip_directory import plain_directory
from tests.support.calls import python_calls
from tests.support.checkpoints import torch_image
from tests.support.memory_store import MemoryStore

# Names of one, two and three digits.
IMAGE = torch_image({str(number): torch.ones(number % 3 + 1) for number in range(120)})


def found_in(image: bytes) -> dict[bytes, tuple[int, ...]] | None:
    store = MemoryStore()
    store.write("file", image)
    found = plain_directory(store, "file", len(image))
    return None if found is None else {name: tuple(said) for name, said in found.items()}


def by_zipfile(image: bytes) -> dict[bytes, tuple[int, ...]]:
    with zipfile.ZipFile(io.BytesIO(image)) as archive:
        return {
            info.orig_filename.encode(): (info.CRC, info.file_size, info.compress_type)
            for info in archive.infolist()
        }


def test_a_zip_directory_is_read_as_zipfile_reads_it() -> None:
    found = found_in(IMAGE)
    assert found == by_zipfile(IMAGE)
    assert len(found) > 120


def test_wherever_a_byte_changed_it_is_what_zipfile_says_or_nothing() -> None:
    """The changes are in the records of a directory, and in the end of the file."""
    said = 0
    begin = IMAGE.index(b"PK\x01\x02")
    for at in [*range(begin, begin + 300), *range(len(IMAGE) - 120, len(IMAGE))]:
        for mask in (0x01, 0x10, 0x80):
            image = bytearray(IMAGE)
            image[at] ^= mask
            found = found_in(bytes(image))
            if found is not None and all(name.isascii() and b"\0" not in name for name in found):
                assert found == by_zipfile(bytes(image)), (at, mask)
                said += 1
    assert said > 100, "times and names, among others"


def test_the_end_of_a_large_file_is_read_too() -> None:
    end = IMAGE.rindex(b"PK\x05\x06")
    count, size, offset = struct.unpack_from("<HII", IMAGE, end + 10)
    end64 = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, offset)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, offset + size, 1)
    head = IMAGE[: offset + size]  # torch may have written such an end itself
    large = (
        head
        + end64
        + locator
        + struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, *[0xFFFF] * 2, *[0xFFFFFFFF] * 2, 0)
    )
    assert found_in(large) == by_zipfile(large) == by_zipfile(IMAGE)


def test_a_directory_that_is_not_plain_gives_none() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        info = zipfile.ZipInfo("archive/data.pkl")
        info.comment = b"a comment"
        archive.writestr(info, b"bytes")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"bytes" * 100)
    for image in (out.getvalue(), packed.getvalue(), IMAGE[:-1], IMAGE + b"\0", b"PK", b"", b"x" * 200):
        assert found_in(image) is None


def test_the_number_of_records_costs_no_python_calls() -> None:
    calls = []
    for tensors in (120, 900):
        image = torch_image({str(number): torch.ones(1) for number in range(tensors)})
        store = MemoryStore()
        store.write("file", image)
        reading = partial(plain_directory, store, "file", len(image))
        calls.append(python_calls(reading, of="holdfast/"))
    assert calls[0] == calls[1]
