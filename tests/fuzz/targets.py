"""What is fuzzed: each takes any bytes, hands them to a parser, and uses what comes out as the product would.

    hypothesis ─► tests/fuzz/test_parsers.py ─┐
    atheris ────► tests/fuzz/guided.py ───────┴─► target(data)   our own errors are fine, anything else is a finding

Behind a CRC random bytes go nowhere: the first byte of `data` says whether the rest is sealed before it is parsed.
"""

from __future__ import annotations

import mmap
import struct
import warnings
import zlib
from collections.abc import Callable
from typing import Any

from holdfast.catalog import Catalog
from holdfast.claim import Claim, Identity
from holdfast.crc import crc32
from holdfast.errors import HoldfastError
from holdfast.ipc import Message
from holdfast.journal import HEADER_BYTES, RECORD_BYTES, Header, Journal
from holdfast.layout import Layout
from holdfast.layout_index import LayoutIndex
from holdfast.manifest import Manifest
from holdfast.notice import Notice, Terms
from holdfast.sealed import seal
from holdfast.storage.names import check_name, check_write_id
from holdfast.verify import verify_file
from holdfast.wire import (
    HEADER_BYTES as FRAME_HEADER_BYTES,
)
from holdfast.wire import Agreement, Frame, Kind, Proposal, Welcome, decode, json_body
from tests.support.memory_store import MemoryStore

__all__ = ["TARGETS", "within_our_errors"]

_RING_CHUNKS = 2


def wire(data: bytes) -> None:
    """A control message and what may be in it."""
    if data[:1] > b"\x7f":
        decode(data[1:])
        return
    body = data[2:]
    kind = list(Kind)[data[1] % len(Kind)] if len(data) > 1 else Kind.HELLO
    header = struct.pack("<IHHQQIIQII", 0x31574648, 1, kind, 3, 4, 5, 6, 7, len(body), 0)
    assert len(header) == FRAME_HEADER_BYTES
    version = decode.__globals__["VERSION"]
    header = header[:4] + struct.pack("<H", version) + header[6:]
    frame = decode(header[:-4] + struct.pack("<I", crc32(body, crc32(header))) + body)
    for parse in (
        Welcome.from_frame,
        Agreement.from_frame,
        Proposal.from_frame,
        _packed_proposal,
        _notice,
        _terms,
        json_body,
    ):
        try:
            parse(frame)
        except HoldfastError:
            continue


def _notice(frame: Frame) -> Notice:
    return Notice.from_json(json_body(frame))


def _terms(frame: Frame) -> Terms:
    return Terms.from_json(json_body(frame))


def _packed_proposal(frame: Frame) -> Proposal:
    return Proposal.from_frame(Frame(frame.kind, body=zlib.compress(frame.body)))


def layout(data: bytes) -> None:
    """A layout, and all that the flusher derives from one."""
    raw = data[1:] if data[:1] > b"\x7f" else zlib.compress(data[1:])
    found = Layout.from_bytes(raw)
    if found.chunks > 1000:  # sizes of this order are real, and not what is looked for here
        return
    index = LayoutIndex(found)
    for chunk in range(found.chunks):
        assert sum(segment.nbytes for segment in found.segments(chunk)) == found.chunk_extent(chunk).nbytes
        for rank in found.senders(chunk):
            index.contents(chunk, rank)
    assert Layout.from_bytes(found.to_bytes()) == found


def manifest(data: bytes) -> None:
    """A manifest, and the tools on the run that has it."""
    raw = data[1:] if data[:1] > b"\x7f" else seal(data[1:], "manifest_crc32")
    store = MemoryStore()
    store.objects["step-000000007.json"] = raw
    (item,) = Catalog(store).list()
    if item.manifest is None:
        return
    found = item.manifest
    again = Manifest.from_bytes(found.to_bytes(), source="again")  # as rank 0 hands it to the others
    assert again.model_copy(update={"record": {}}) == found.model_copy(update={"record": {}})
    check_name(found.file)
    if found.image_bytes <= 1 << 16:
        store.objects[found.file] = bytes(found.image_bytes)
        verify_file(store, found, threads=1).summary()


def journal(data: bytes) -> None:
    """Header and records of a ring's journal."""
    memory = mmap.mmap(-1, HEADER_BYTES + _RING_CHUNKS * RECORD_BYTES)
    with memory:
        if data[:1] > b"\x7f":
            memory[: len(data) - 1] = data[1:][: len(memory)]
        else:
            Journal.write_header(memory, Header(4096, _RING_CHUNKS, 5))
            body = bytearray(data[1 : 1 + RECORD_BYTES].ljust(64, b"\0"))
            count = min(struct.unpack_from("<I", body, 40)[0], (len(body) - 64) // 8)
            struct.pack_into("<I", body, 32, crc32(bytes(body[8:32])))
            struct.pack_into(
                "<I", body, 36, crc32(bytes(body[64 : 64 + 8 * count]), crc32(bytes(body[40:52])))
            )
            memory[HEADER_BYTES : HEADER_BYTES + len(body)] = bytes(body)
        found = Journal(memory, "journal")
        for slot in range(found.header.ring_chunks):
            try:
                record = found.record(slot)
            except HoldfastError:
                continue
            assert record.nbytes <= found.header.chunk_bytes
            assert len(record.sources) <= 1016


def message(data: bytes) -> None:
    """A packet between stager and flusher."""
    Message.from_bytes(data).to_bytes()


def claim(data: bytes) -> None:
    """A writer's claim, found by the next one."""
    raw = data[1:] if data[:1] > b"\x7f" else seal(data[1:], "claim_crc32")
    store = MemoryStore()
    store.objects[".holdfast/writer-000003.json"] = raw
    taken = Claim.take(store, sleep=lambda _: None, identity=Identity.of_this_process())
    assert taken.attempt == 4


def name(data: bytes) -> None:
    """A name in a store: what passes stays inside."""
    text = data.decode(errors="surrogateescape")
    inside = check_name(text)
    assert not inside.startswith(("/", ".holdfast/tmp"))
    assert ".." not in inside.split("/")
    assert "\0" not in inside
    check_write_id(text)


def structure(data: bytes) -> None:
    """A portable file as restore reads it: any bytes with a manifest that says that they are whole."""
    from tests.fuzz.files import restore_bytes

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about what hostile pickles ask for
        restore_bytes(data)


TARGETS: dict[str, Callable[[bytes], Any]] = {
    target.__name__: target for target in (wire, layout, manifest, journal, message, claim, name, structure)
}


def within_our_errors(target: Callable[[bytes], Any], data: bytes) -> bool:
    """Run a target; whether it took the input. Anything but an error of ours goes on to the caller."""
    try:
        target(data)
    except HoldfastError as error:
        said = str(error)
    else:
        return True
    assert said, "an error that says nothing"
    assert len(said) < 20_000, "an error as long as its input"
    return False
