"""Real inputs of every target: the fuzzers start from them."""

from __future__ import annotations

import mmap
import zlib
from pathlib import Path

from holdfast.checkpoints.lease import Lease
from holdfast.notices.notice import Notice, NoticeKind, SaveInstruction
from holdfast.ring.doorbell import Message
from holdfast.ring.journal import HEADER_BYTES, RECORD_BYTES, Header, Journal
from holdfast.sealed import unseal
from holdfast.telemetry.status_document import CheckpointStatus, RankStatus, StatusDocument, StatusLine
from holdfast.wire.frames import Kind, decode, encode, to_json
from holdfast.wire.state_messages import Agreement, Proposal
from holdfast.wire.welcome import Welcome
from tests.fuzz.files import SEED, manifest_for
from tests.support.images import made_up
from tests.support.memory_store import MemoryStore
from tests.unit.operator_side.report.logs import EVENTS as _EVENT_LOG
from tests.unit.operator_side.report.logs import STATUS as _STATUS_LOG

__all__ = ["SEEDS"]

_OPEN, _AS_IS = b"\x00", b"\xff"  # sealed by the target; parsed unchanged
_LAYOUT = made_up(1, entries=4, chunk_bytes=4096, ranks=2, entry_bytes_max=5000).layout


def _journal() -> bytes:
    with mmap.mmap(-1, HEADER_BYTES + 2 * RECORD_BYTES) as memory:
        Journal.write_header(memory, Header(4096, 2, 5))
        made = Journal(memory, Path("/nowhere"))
        made.mark_filling(0, 5, 40, 1)
        made.mark_full(0, [(0, 7), (3, 8)], 4000)
        made.mark_filling(1, 5, 40, 2)
        return memory[:]


def _claim() -> bytes:
    store = MemoryStore()
    Lease.acquire(store)
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
_LINE = StatusLine(at_unix=5.0, event="flush_held", step=8, text="no room")
_SAID = StatusDocument(
    role="stager",
    run="/mnt/run",
    pid=7,
    attempt=2,
    since_unix=1.0,
    now_unix=9.0,
    ranks_total=70,
    ranks=(
        RankStatus(
            rank=1, host="spot-7", pid=8, state="silent", quiet_seconds=2.0, step=8, stall_seconds=0.1
        ),
    ),
    checkpoints=(
        CheckpointStatus(attempt=2, step=4, saved_at_unix=1.0, durable_at_unix=3.0, read_back="verified"),
        CheckpointStatus(
            attempt=2,
            step=8,
            image_bytes=4096,
            saved_at_unix=3.0,
            staged_at_unix=4.0,
            pgt1_seconds=1.0,
            pgt2_seconds=2.0,
            stall_seconds=0.1,
        ),
    ),
    not_taken={"busy": 3},
    declined=(_LINE,),
    notices=(_LINE,),
    problems=(_LINE,),
)
_CLAIM = _claim()
_LOG_BYTES = 2500  # the last line is cut

_PROFILE = to_json(
    {
        "source": "a seed",
        "iteration_seconds": 1.8,
        "restart_seconds": 140,
        "strategies": {
            "holdfast": {
                "stall_seconds": 0.05,
                "staged_seconds": 4.0,
                "durable_seconds": 11.0,
                "restore_seconds": 20.0,
                "stager": True,
            }
        },
    }
)

SEEDS: dict[str, list[bytes]] = {
    "wire": [
        _AS_IS + encode(Kind.SENT, attempt=1, step=2, chunk=3, flags=4, arg=5),
        _OPEN + b"\x0b" + _WELCOME,
        _OPEN + b"\x0c" + _AGREEMENT,
        _OPEN + b"\x09" + to_json(_NOTICE.to_json(0.0)),
        _OPEN + b"\x14" + to_json(SaveInstruction(True, "there is time", _NOTICE, 4, 100).to_json()),
        _OPEN + b"\x01" + _PROPOSAL,
        _OPEN + b"\x01" + _PROPOSAL[:8] + zlib.decompress(_PROPOSAL[8:]),
    ],
    "layout": [_AS_IS + _LAYOUT.to_bytes(), _OPEN + zlib.decompress(_LAYOUT.to_bytes())],
    "manifest": [_AS_IS + _MANIFEST, _OPEN + _body(_MANIFEST, "manifest_crc32")],
    "journal": [_AS_IS + _JOURNAL, _OPEN + _JOURNAL[HEADER_BYTES : HEADER_BYTES + 96]],
    "message": [
        Message("begin", {"attempt": 1, "step": 2, "layout_digest": "ab"}).to_bytes(),
        Message("freed", {"slots": [1, 2]}).to_bytes(),
        Message("state", {"document": _SAID.model_dump(mode="json")}).to_bytes(),
        Message(
            "durable", {"attempt": 1, "step": 2, "file": "f", "pgt2_seconds": 0.5, "record": {}}
        ).to_bytes(),
    ],
    "events": [_STATUS_LOG.read_bytes()[:_LOG_BYTES], _EVENT_LOG.read_bytes()[:_LOG_BYTES]],
    "claim": [_AS_IS + _CLAIM, _OPEN + _body(_CLAIM, "claim_crc32")],
    "name": [b"step-000000001.pt", b".holdfast/writer-000001.json", b"../x", b"a//b"],
    "trace": [
        b",Time,GPUs\n0,1652434464.4,56\n1,1652434527.4,55\n2,1652438127.4,56\n",
        b"2021-12-11, 11:11:30, 55\n2021-12-11, 11:15:50, 54\n2021-12-11, 12:15:50, 55\n",
        b"0,add,node1\n480000,add,node2\n1440000,remove,node1\n5040000,add,node3\n",
    ],
    "profile": [_PROFILE, b'{"profile": ' + _PROFILE + b', "seed": 0}'],
    "structure": [SEED],
}
