"""Many small tensors in one chunk: loops in C check them and fill in CRCs, without a Python call for each."""

from __future__ import annotations

import zlib
from functools import partial

import pytest

from holdfast.crc import crc32
from holdfast.errors import DamageError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.chunks import Source, patch_chunk, verify_chunk
from holdfast.image.entries import REPLICATED, Entry
from holdfast.image.index import LayoutIndex
from holdfast.image.layout import Layout
from tests.support.calls import python_calls

KEY = CheckpointId(1, 1)
_ENTRY_BYTES = 19  # so that fields begin at any address


class _Scene:
    """One chunk with this many entries; behind each its CRC, and at the end all of them again, as in a zip file."""

    def __init__(self, entries: int) -> None:
        apart = _ENTRY_BYTES + 6
        directory = entries * apart
        self.layout = Layout(
            directory + 4 * entries + 1,
            1 << 20,
            1,
            tuple(
                Entry(
                    str(number),
                    number * apart,
                    _ENTRY_BYTES,
                    REPLICATED,
                    (number * apart + _ENTRY_BYTES + 1, directory + 4 * number),
                )
                for number in range(entries)
            ),
        )
        self.index = LayoutIndex(self.layout)
        self.memory = bytearray(number * 7 % 251 for number in range(self.layout.image_bytes))
        self.fields = [field for entry in self.layout.entries for field in entry.crc_fields]
        sent = bytearray(self.memory)
        for field in self.fields:
            sent[field : field + 4] = bytes(4)
        self.sent = bytes(sent)
        self.entry_crcs = [zlib.crc32(self.sent[entry.offset : entry.end]) for entry in self.layout.entries]

    def verify(self) -> tuple[int, ...]:
        sources = (Source(0, zlib.crc32(self.sent)),)
        return verify_chunk(memoryview(self.memory), self.index, 0, sources, key=KEY)

    def patch(self, verified: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        fields = self.index.fields[0]
        entry_crcs = tuple(map(self.entry_crcs.__getitem__, fields.entries))
        verified_crcs = tuple(map(verified.__getitem__, fields.segments))
        return patch_chunk(memoryview(self.memory), self.index, 0, entry_crcs, verified_crcs, key=KEY)


def test_every_field_gets_the_crc_of_its_entry() -> None:
    scene = _Scene(60)
    verified = scene.verify()
    assert bytes(scene.memory) == scene.sent
    changed = scene.patch(verified)
    for number, entry in enumerate(scene.layout.entries):
        for field in entry.crc_fields:
            assert scene.memory[field : field + 4] == scene.entry_crcs[number].to_bytes(4, "little")
    crcs = dict(enumerate(verified)) | dict(changed)
    for number, segment in enumerate(scene.layout.segments(0)):
        assert crcs[number] == crc32(scene.memory[segment.offset : segment.end])
    assert [number for number, _ in changed] == list(scene.index.fields[0].segments)
    assert scene.patch(verified) == changed, "and again, by a flusher that goes on"


def test_a_header_that_changed_since_it_was_verified_is_named() -> None:
    scene = _Scene(60)
    verified = scene.verify()
    at = scene.layout.entries[40].end  # before the field
    scene.memory[at] ^= 1
    before = bytes(scene.memory)
    with pytest.raises(DamageError, match=f"chunk 0: bytes {at} to {at + 6} have CRC-32"):
        scene.patch(verified)
    assert bytes(scene.memory) == before


def test_the_number_of_tensors_costs_no_python_calls() -> None:
    calls = []
    for entries in (100, 1000):
        scene = _Scene(entries)
        verified = scene.verify()  # the first time the layout finds out who sends what
        verifying = python_calls(scene.verify)
        patching = python_calls(partial(scene.patch, verified))
        calls.append((verifying, patching))
    assert calls[0] == calls[1]
