"""Images for tests: small synthetic layouts, and real `torch.save` files taken apart into a layout."""

from __future__ import annotations

import random
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from holdfast.image.entries import REPLICATED, Entry, TensorInfo
from holdfast.image.layout import Layout

_LOCAL_HEADER = struct.Struct("<IHHHHHIIIHH")
_CENTRAL_HEADER = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_END64_LOCATOR = struct.Struct("<IIQI")
_END64 = struct.Struct("<IQHHIIQQQQ")


@dataclass(frozen=True)
class Image:
    """A layout, the bytes of the final file, and the bytes as trainers send them (CRC fields zero)."""

    layout: Layout
    final: bytes
    sent: bytes

    def frame(self, chunk: int, rank: int) -> bytes:
        """The bytes that `rank` sends for `chunk`."""
        return b"".join(self.sent[e.offset : e.end] for e in self.layout.pieces(chunk, rank))

    def sources(self, chunk: int) -> list[tuple[int, int]]:
        """`(rank, crc32)` of the frames of `chunk`."""
        return [(rank, zlib.crc32(self.frame(chunk, rank))) for rank in self.layout.senders(chunk)]

    def chunk_bytes(self, chunk: int) -> bytes:
        """All bytes of `chunk` as they arrive."""
        extent = self.layout.chunk_extent(chunk)
        return self.sent[extent.offset : extent.end]


def made_up(seed: int, *, entries: int, chunk_bytes: int, ranks: int, entry_bytes_max: int) -> Image:
    """An image of random bytes with entries, descriptors behind them and a directory at the end."""
    chance = random.Random(seed)
    body = bytearray(chance.randbytes(chance.randrange(64)))
    places: list[tuple[int, int, int]] = []
    for _ in range(entries):
        nbytes = chance.choice([0, 1, chance.randrange(entry_bytes_max + 1)])
        places.append((len(body), nbytes, len(body) + nbytes + chance.randrange(3)))
        body += chance.randbytes(nbytes) + chance.randbytes(2 + 4 + chance.randrange(40))
    directory: list[int] = []
    for _ in range(entries):
        body += chance.randbytes(chance.randrange(30))
        directory.append(len(body))
        body += bytes(4)
    body += chance.randbytes(chance.randrange(1, 40))
    owners = [chance.choice([REPLICATED, REPLICATED, *range(ranks)]) for _ in range(entries)]
    made = tuple(
        Entry(f"archive/data/{n}", offset, nbytes, owners[n], (descriptor, directory[n]))
        for n, (offset, nbytes, descriptor) in enumerate(places)
    )
    tensors = tuple(
        TensorInfo(f"model/layer.{n}.weight", "uint8", (e.nbytes,), n) for n, e in enumerate(made)
    )
    return _finish(Layout(len(body), chunk_bytes, ranks, made, tensors), body)


def from_torch_file(path: Path, *, chunk_bytes: int, ranks: int) -> Image:
    """The image of a file that `torch.save` wrote: the same bytes, cut into a layout for `ranks` ranks."""
    data = path.read_bytes()
    entries: list[Entry] = []
    for crc_at, name, header_at, nbytes in _directory(data):
        fields = _LOCAL_HEADER.unpack_from(data, header_at)
        flags, name_bytes, extra_bytes = fields[2], fields[9], fields[10]
        begin = header_at + _LOCAL_HEADER.size + name_bytes + extra_bytes
        descriptor = begin + nbytes + 4
        assert flags & 8, "torch writes data descriptors"
        assert data[begin + nbytes :][:4] == b"PK\x07\x08"
        owner = REPLICATED if "/data/" in name else 0
        entries.append(Entry(name, begin, nbytes, owner, (descriptor, crc_at)))
    entries.sort(key=lambda entry: entry.offset)
    tensors = tuple(
        TensorInfo(f"state/{entry.name.rpartition('/')[2]}", "uint8", (entry.nbytes,), number)
        for number, entry in enumerate(entries)
        if "/data/" in entry.name
    )
    layout = Layout(len(data), chunk_bytes, ranks, tuple(entries), tensors)
    image = _finish(layout, bytearray(data))
    assert image.final == data, "torch's own CRCs are true"
    return image


def _directory(data: bytes) -> list[tuple[int, str, int, int]]:
    """`(image offset of the CRC field, name, offset of the local header, bytes)` of each record."""
    end_at = data.rindex(b"PK\x05\x06")
    end = _END.unpack_from(data, end_at)
    count, at = end[4], end[6]
    locator_at = end_at - _END64_LOCATOR.size
    if data[locator_at : locator_at + 4] == b"PK\x06\x07":
        end64 = _END64.unpack_from(data, _END64_LOCATOR.unpack_from(data, locator_at)[2])
        count, at = end64[7], end64[9]
    records: list[tuple[int, str, int, int]] = []
    for _ in range(count):
        fields = _CENTRAL_HEADER.unpack_from(data, at)
        name_bytes, extra_bytes, comment_bytes = fields[10:13]
        name = data[at + _CENTRAL_HEADER.size :][:name_bytes].decode()
        assert fields[9] < 0xFFFFFFFF
        assert fields[16] < 0xFFFFFFFF
        records.append((at + 16, name, fields[16], fields[9]))
        at += _CENTRAL_HEADER.size + name_bytes + extra_bytes + comment_bytes
    return records


def _finish(layout: Layout, body: bytearray) -> Image:
    sent, final = bytearray(body), bytearray(body)
    for entry in layout.entries:
        crc = zlib.crc32(body[entry.offset : entry.end]).to_bytes(4, "little")
        for crc_field in entry.crc_fields:
            sent[crc_field : crc_field + 4] = bytes(4)
            final[crc_field : crc_field + 4] = crc
    return Image(layout, bytes(final), bytes(sent))
