"""A byte flips on the wire: in a control message, or in a payload whose CRC is in a SENT message."""

from __future__ import annotations

from collections import Counter

import pytest

from holdfast.crc import crc32
from holdfast.errors import DamageError, ProtocolError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.chunks import Source, verify_chunk
from holdfast.image.index import LayoutIndex
from holdfast.wire.frames import HEADER_BYTES, Frame, Kind, decode, encode, to_json
from holdfast.wire.state_messages import Agreement, Proposal
from holdfast.wire.welcome import Welcome
from tests.rot.flips import COUNT, Flip, flips
from tests.support.images import made_up

_MESSAGES = {
    "HELLO": encode(Kind.HELLO, body=to_json({"host": "spot-1", "pid": 77})),
    "PROPOSE": Proposal("ab" * 32, [["model/w", "float32", [3, 4], -1]], 900, {"rng": 5000}).to_frame(3),
    "RESERVED": Agreement(8192, {"rng": 8192}).to_frame(3),
    "WELCOME": Welcome("s3://bucket/run", 3, 1 << 24, 64, 2, 60.0, 1.0).to_frame(),
    "CREDIT": encode(Kind.CREDIT, attempt=3, step=40, chunk=9, arg=5),
    "SENT": encode(Kind.SENT, attempt=3, step=40, chunk=9, flags=0xDEADBEEF, arg=4096),
    "LAYOUT": encode(
        Kind.LAYOUT,
        attempt=3,
        body=made_up(1, entries=9, chunk_bytes=4096, ranks=2, entry_bytes_max=9000).layout.to_bytes(),
    ),
}


@pytest.mark.parametrize("name", _MESSAGES)
def test_every_flip_in_a_control_message_is_refused(name: str) -> None:
    whole = _MESSAGES[name]
    assert decode(whole).kind.name == name
    hit: Counter[str] = Counter()
    for flip in flips(name, len(whole)):
        with pytest.raises(ProtocolError, match=r"control message|expected"):
            decode(flip.applied(whole))
        hit["header" if flip.offset < HEADER_BYTES else "body"] += 1
    assert hit.total() == COUNT
    assert (hit["body"] > 0) == (len(whole) > HEADER_BYTES)


def test_every_flip_in_a_payload_names_rank_and_chunk() -> None:
    """Several ranks send into the slots of a ring; the flusher compares with the CRC in each SENT message."""
    image = made_up(5, entries=12, chunk_bytes=4096, ranks=3, entry_bytes_max=5000)
    layout, index = image.layout, LayoutIndex(image.layout)
    payloads = [
        (chunk, rank, image.frame(chunk, rank))
        for chunk in range(layout.chunks)
        for rank in layout.senders(chunk)
    ]
    sent = {(chunk, rank): _heard(chunk, payload) for chunk, rank, payload in payloads}
    places = [(number, at) for number, (_, _, payload) in enumerate(payloads) for at in range(len(payload))]
    hit: Counter[tuple[int, int]] = Counter()
    harmless = 0
    for flip in flips("payload", len(places)):
        number, at = places[flip.offset]
        chunk, rank, payload = payloads[number]
        memory = bytearray(image.chunk_bytes(chunk))
        arrived = memoryview(Flip(at, flip.mask).applied(payload))
        for extent in layout.pieces(chunk, rank):
            begin = extent.offset - chunk * layout.chunk_bytes
            memory[begin : begin + extent.nbytes] = arrived[: extent.nbytes]
            arrived = arrived[extent.nbytes :]
        sources = tuple(Source(other, sent[chunk, other].flags) for other in layout.senders(chunk))
        key = CheckpointId(1, 2)
        if _hit_is_a_crc_field(memory, image.chunk_bytes(chunk), index, chunk):
            # These bytes travel as zeros, and the flusher overwrites them without reading them.
            verify_chunk(memoryview(memory), index, chunk, sources, key=key)
            assert memory == image.chunk_bytes(chunk), "a CRC field is not zeroed before it is summed"
            harmless += 1
            continue
        with pytest.raises(DamageError, match=rf"chunk {chunk} from rank {rank}"):
            verify_chunk(memoryview(memory), index, chunk, sources, key=key)
        hit[chunk, rank] += 1
    assert hit.total() + harmless == COUNT
    assert len(hit) > len(payloads) // 2, "most payloads were never hit"
    assert harmless < COUNT // 10


def _heard(chunk: int, payload: bytes) -> Frame:
    return decode(encode(Kind.SENT, attempt=1, step=2, chunk=chunk, flags=crc32(payload), arg=len(payload)))


def _hit_is_a_crc_field(memory: bytearray, whole: bytes, index: LayoutIndex, chunk: int) -> bool:
    (offset,) = (n for n in range(len(whole)) if memory[n] != whole[n])
    offset += chunk * index.layout.chunk_bytes
    places = [place for entry in index.layout.entries for place in entry.crc_fields]
    return any(place <= offset < place + 4 for place in places)
