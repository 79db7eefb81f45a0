"""Real inputs of every target: where the fuzzers start from."""

from __future__ import annotations

import mmap
import zlib

from holdfast.claim import Claim
from holdfast.ipc import Message
from holdfast.journal import HEADER_BYTES, RECORD_BYTES, Header, Journal
from holdfast.notice import Notice, NoticeKind, Terms
from holdfast.sealed import unseal
from holdfast.wire import Agreement, Kind, Proposal, Welcome, decode, encode, to_json
from tests.fuzz.files import SEED, manifest_for
from tests.support.images import made_up
from tests.support.memory_store import MemoryStore

__all__ = ["SEEDS"]

_OPEN, _AS_IS = b"\x00", b"\xff"  # sealed by the target; taken as it comes
_LAYOUT = made_up(1, entries=4, chunk_bytes=4096, ranks=2, entry_bytes_max=5000).layout


def _journal() -> bytes:
    with mmap.mmap(-1, HEADER_BYTES + 2 * RECORD_BYTES) as memory:
        Journal.write_header(memory, Header(4096, 2, 5))
        made = Journal(memory, "seed")
        made.mark_filling(0, 5, 40, 1)
        made.mark_full(0, [(0, 7), (3, 8)], 4000)
        made.mark_filling(1, 5, 40, 2)
        return memory[:]


def _claim() -> bytes:
    store = MemoryStore()
    Claim.take(store)
    return store.objects[".holdfast/writer-000001.json"]


def _body(data: bytes, field: str) -> bytes:
    body = unseal(data, field)
    assert body is not None
    return body


_WELCOME = decode(Welcome("/mnt/run", 3, 4096, 64, 2, 60.0, 1.0).to_frame()).body
_AGREEMENT = decode(Agreement(8192, {"rng": 4096}).to_frame(3)).body
_PROPOSAL = decode(Proposal("ab", [["w", "float32", [2], -1]], 900, {"rng": 8}).to_frame(3)).body
_NOTICE = Notice(NoticeKind.TERMINATE, 120.0, "aws", "instance-action terminate", 1)
_MANIFEST = manifest_for(SEED).to_bytes()
_JOURNAL = _journal()
_CLAIM = _claim()

SEEDS: dict[str, list[bytes]] = {
    "wire": [
        _AS_IS + encode(Kind.SENT, attempt=1, step=2, chunk=3, flags=4, arg=5),
        _OPEN + b"\x0b" + _WELCOME,
        _OPEN + b"\x0c" + _AGREEMENT,
        _OPEN + b"\x09" + to_json(_NOTICE.to_json(0.0)),
        _OPEN + b"\x14" + to_json(Terms(True, "there is time", _NOTICE, 4, 100).to_json()),
        _OPEN + b"\x01" + _PROPOSAL,
        _OPEN + b"\x01" + zlib.decompress(_PROPOSAL),
    ],
    "layout": [_AS_IS + _LAYOUT.to_bytes(), _OPEN + zlib.decompress(_LAYOUT.to_bytes())],
    "manifest": [_AS_IS + _MANIFEST, _OPEN + _body(_MANIFEST, "manifest_crc32")],
    "journal": [_AS_IS + _JOURNAL, _OPEN + _JOURNAL[HEADER_BYTES : HEADER_BYTES + 96]],
    "message": [
        Message("begin", {"attempt": 1, "step": 2, "layout_digest": "ab"}).to_bytes(),
        Message("freed", {"slots": [1, 2]}).to_bytes(),
        Message(
            "durable", {"attempt": 1, "step": 2, "file": "f", "pgt2_seconds": 0.5, "record": {}}
        ).to_bytes(),
    ],
    "claim": [_AS_IS + _CLAIM, _OPEN + _body(_CLAIM, "claim_crc32")],
    "name": [b"step-000000001.pt", b".holdfast/writer-000001.json", b"../x", b"a//b"],
    "structure": [SEED],
}
