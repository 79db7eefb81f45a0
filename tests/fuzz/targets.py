"""The fuzz targets: each takes any bytes, passes them to a parser, and uses the result as the product would.

    hypothesis ─► tests/fuzz/test_parsers.py ─┐
    atheris ────► tests/fuzz/guided.py ───────┴─► target(data)   our own errors are fine, anything else is a finding

Random bytes never pass a CRC: the first byte of `data` says whether the target seals the rest before it parses it.
"""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import struct
import tempfile
import tomllib
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from holdfast.checkpoints.catalog import Catalog
from holdfast.checkpoints.identity import Identity
from holdfast.checkpoints.lease import Lease
from holdfast.checkpoints.verification import verify_file
from holdfast.config import TrainerConfig
from holdfast.crc import crc32
from holdfast.errors import HoldfastError
from holdfast.image.index import LayoutIndex
from holdfast.image.layout import Layout
from holdfast.image.manifest import Manifest
from holdfast.notices.notice import Notice, SaveInstruction
from holdfast.ring.doorbell import Message
from holdfast.ring.journal import HEADER_BYTES, RECORD_BYTES, SOURCES_INSIDE_MAX, Header, Journal
from holdfast.sealed import seal
from holdfast.store.names import check_name, check_write_id
from holdfast.telemetry.event_reading import Log, read_logs
from holdfast.telemetry.rows import StoredCheckpoint
from holdfast.telemetry.status_document import read_status
from holdfast.wire.frames import HEADER_BYTES as FRAME_HEADER_BYTES
from holdfast.wire.frames import Frame, Kind, decode, json_body
from holdfast.wire.state_messages import Agreement, Proposal
from holdfast.wire.welcome import Welcome
from operator_side.commands.status_output import render
from operator_side.report.facts import gather_facts
from operator_side.report.page import report_page
from operator_side.report.sentences import find_hints, summarize_run
from operator_side.simulate.profiles import load_profile
from operator_side.simulate.replay import StrategyLane, TrainingJob, replay
from operator_side.simulate.strategy import IDEAL
from operator_side.simulate.trace_windows import cut_windows
from operator_side.simulate.traces import read_trace
from operator_side.simulate.tuning import TuningRequest, tune
from operator_side.status.run_status import Peer, RunEvidence, compose
from tests.support.memory_store import MemoryStore

__all__ = ["TARGETS", "within_our_errors"]

_RING_CHUNKS = 2
_WINDOW_US = 3_600_000_000
_EVENTS_MAX = 1000
_PAGE_BYTES_MAX = 2_000_000


def wire(data: bytes) -> None:
    """A control message and its contents."""
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


def _terms(frame: Frame) -> SaveInstruction:
    return SaveInstruction.from_json(json_body(frame))


def _packed_proposal(frame: Frame) -> Proposal:
    return Proposal.from_frame(Frame(frame.kind, body=zlib.compress(frame.body)))


def layout(data: bytes) -> None:
    """A layout, and all that the flusher derives from one."""
    raw = data[1:] if data[:1] > b"\x7f" else zlib.compress(data[1:])
    found = Layout.from_bytes(raw)
    if found.chunks > 1000:  # sizes of this order are real, and not a target of this test
        return
    index = LayoutIndex(found)
    for chunk in range(found.chunks):
        assert sum(segment.nbytes for segment in found.segments(chunk)) == found.chunk_extent(chunk).nbytes
        for rank in found.senders(chunk):
            index.describe_contents(chunk, rank)
    assert Layout.from_bytes(found.to_bytes()) == found


def manifest(data: bytes) -> None:
    """A manifest, and the tools on a run with it."""
    raw = data[1:] if data[:1] > b"\x7f" else seal(data[1:], "manifest_crc32")
    store = MemoryStore()
    store.objects["step-000000007.json"] = raw
    (item,) = Catalog(store).list()
    if item.manifest is None:
        return
    found = item.manifest
    again = Manifest.from_bytes(found.to_bytes(), source="again")  # as rank 0 sends it to the others
    assert again.model_copy(update={"record": {}}) == found.model_copy(update={"record": {}})
    check_name(found.file)
    stored = StoredCheckpoint.from_manifest(found)
    report_page(gather_facts("/mnt/run", Log(), [] if stored is None else [stored]), made_at_unix=2e9)
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
        found = Journal(memory, Path("/nowhere"))
        for slot in range(found.header.ring_chunks):
            try:
                record = found.record(slot)
            except HoldfastError:
                continue
            assert record.nbytes <= found.header.chunk_bytes
            assert len(record.sources) <= SOURCES_INSIDE_MAX, "there are no files of more"


def message(data: bytes) -> None:
    """A packet between stager and flusher, or from one of them to `holdfast status`, which draws it."""
    found = Message.from_bytes(data)
    found.to_bytes()
    if found.kind == "state":
        said = read_status(found.fields["document"], "here")
        here = Peer("here", said.pid, said.since_unix)
        picture = compose(said.run, 2e9, RunEvidence(here, here, said, said))
        json.dumps(picture.document(), allow_nan=False)
        Console(file=io.StringIO(), width=80).print(render(picture, height=24))


def events(data: bytes) -> None:
    """An event log, and its report: an HTML page of a fixed structure, whatever the log says."""
    with _file(data) as path:
        facts = gather_facts("/mnt/run", read_logs([path]), dollars_per_hour=1.0)
    json.dumps(
        [facts.unknown, [one._asdict() for one in find_hints(facts)], summarize_run(facts)], allow_nan=False
    )
    made = report_page(facts, made_at_unix=2e9)
    assert made.count(b"<script") == 2  # its own two: the charts' library and the drawing code
    assert len(made) < _PAGE_BYTES_MAX


def claim(data: bytes) -> None:
    """A writer's claim, found by the next writer."""
    raw = data[1:] if data[:1] > b"\x7f" else seal(data[1:], "claim_crc32")
    store = MemoryStore()
    store.objects[".holdfast/writer-000003.json"] = raw
    taken = Lease.acquire(store, sleep=lambda _: None, identity=Identity.of_this_process())
    assert taken.attempt == 4


def name(data: bytes) -> None:
    """A name in a store: a valid name stays inside the store."""
    text = data.decode(errors="surrogateescape")
    inside = check_name(text)
    assert not inside.startswith(("/", ".holdfast/tmp"))
    assert ".." not in inside.split("/")
    assert "\0" not in inside
    check_write_id(text)


def trace(data: bytes) -> None:
    """A trace of preemptions, and the replay of the parsed trace."""
    with _file(data) as path:
        found = read_trace(path)
    assert found.end_us > 0
    assert (np.diff(found.time_us) >= 0).all()
    if not found.count_max or found.end_us < _WINDOW_US or len(found.time_us) > _EVENTS_MAX:
        return
    windows = cut_windows(found, length_us=_WINDOW_US, offsets=2, rng=np.random.default_rng(0))
    outcome = replay(TrainingJob(found.count_max, 1, 1_000_000, 0), [StrategyLane(IDEAL, 1)], windows)
    assert (outcome.useful >= 0).all()
    assert (outcome.training_us <= _WINDOW_US).all()


def profile(data: bytes) -> None:
    """Measured figures, and the settings made from them: no text of theirs becomes a setting."""
    with _file(data) as path:
        found = load_profile(path)
    strategy = next(iter(found.strategies))
    answer = tune(TuningRequest(found, mtbf_hours=2.0, strategy=strategy, spot_dollars=1.0))
    document = tomllib.loads(answer.to_toml())
    assert document.keys() == {"trainer"}
    assert document["trainer"].keys() <= {"in_flight_max", "on_full"}
    TrainerConfig(**document["trainer"])


@contextlib.contextmanager
def _file(data: bytes) -> Iterator[Path]:
    """A file in memory, for parsers that read files."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(data)
        file.flush()
        yield Path(file.name)


def structure(data: bytes) -> None:
    """A portable file as restore reads it: any bytes, with a manifest that calls them whole."""
    from tests.fuzz.files import restore_bytes

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about contents of hostile pickles
        restore_bytes(data)


TARGETS: dict[str, Callable[[bytes], Any]] = {
    target.__name__: target
    for target in (wire, layout, manifest, journal, message, events, claim, name, trace, profile, structure)
}


def within_our_errors(target: Callable[[bytes], Any], data: bytes) -> bool:
    """Run a target; return whether it took the input. Errors that are not ours propagate to the caller."""
    try:
        target(data)
    except HoldfastError as error:
        said = str(error)
    else:
        return True
    assert said, "an error that says nothing"
    assert len(said) < 20_000, "an error as long as its input"
    return False
