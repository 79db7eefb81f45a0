"""The ring: the shared-memory format of two processes, and the errors for invalid content."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.errors import ConfigError, ProtocolError
from holdfast.image.entries import Entry
from holdfast.image.layout import SOURCES_MAX, Layout
from holdfast.ring.directory import runtime_directory
from holdfast.ring.journal import HEADER_BYTES, RECORD_BYTES, SOURCES_INSIDE_MAX, Header, Journal, SlotState
from holdfast.ring.ring import Ring

CHUNK_BYTES = 8192
RING_CHUNKS = 4


def layout(chunk_bytes: int = CHUNK_BYTES) -> Layout:
    return Layout(20_000, chunk_bytes, 2, (Entry("archive/data/0", 100, 5000, -1, (5104, 19_000)),))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def ring(directory: Path) -> Iterator[Ring]:
    with Ring.create(directory, chunk_bytes=CHUNK_BYTES, ring_chunks=RING_CHUNKS, attempt=7) as made:
        yield made


def _play_stager(directory: Path) -> None:
    with Ring.attach(directory) as ring:
        digest = ring.put_layout(layout())
        ring.write_checkpoint(7, 12, "receiving", digest, {})
        ring.mark_filling(2, 7, 12, 1)
        ring.slot_memory(2)[:5] = b"hello"
        ring.mark_full(2, [(1, 0xFFFFFFFF), (0, 5)], 8000)
        ring.mark_filling(0, 7, 12, 0)
        ring.write_checkpoint(7, 12, "staged", digest, {"ranks": {"0": {"saved_at_unix": 1.5}}})


def test_another_process_sees_bytes_records_checkpoint_and_layout(ring: Ring, directory: Path) -> None:
    other = multiprocessing.get_context("spawn").Process(target=_play_stager, args=(directory,))
    other.start()
    other.join()
    assert other.exitcode == 0
    full = ring.record(2)
    assert (full.state, full.attempt, full.step, full.chunk, full.nbytes) == (SlotState.FULL, 7, 12, 1, 8000)
    assert full.sources == ((0, 5), (1, 0xFFFFFFFF))
    assert ring.record(0).state is SlotState.FILLING
    assert ring.record(0).sources == ()
    assert [record.state for record in ring.records()].count(SlotState.FREE) == 2
    assert bytes(ring.slot_memory(2)[:6]) == b"hello\0"
    checkpoint = ring.checkpoint(7, 12)
    assert checkpoint is not None
    assert (checkpoint.attempt, checkpoint.step, checkpoint.state) == (7, 12, "staged")
    assert checkpoint.record["ranks"]["0"]["saved_at_unix"] == 1.5
    assert ring.layout(checkpoint.layout_digest) == layout()
    ring.remove_checkpoint(7, 12)
    ring.remove_checkpoint(7, 12)
    assert ring.checkpoint_ids() == []


def test_slots_are_page_aligned_and_do_not_overlap(ring: Ring) -> None:
    for slot in range(RING_CHUNKS):
        ring.slot_memory(slot)[:] = bytes([slot + 1]) * CHUNK_BYTES
    for slot in range(RING_CHUNKS):
        memory = ring.slot_memory(slot)
        assert bytes(memory) == bytes([slot + 1]) * CHUNK_BYTES
        assert not memory.readonly
    import ctypes

    assert ctypes.addressof(ctypes.c_char.from_buffer(ring.slot_memory(1))) % 4096 == 0


def test_states_change_only_along_the_table(ring: Ring) -> None:
    with pytest.raises(ProtocolError, match="state FREE, expected FILLING"):
        ring.mark_full(1, [(0, 0)], 10)
    with pytest.raises(ProtocolError, match="state FREE, expected FILLING or FULL"):
        ring.free(1)
    ring.mark_filling(1, 7, 0, 0)
    with pytest.raises(ProtocolError, match="state FILLING, expected FREE"):
        ring.mark_filling(1, 7, 0, 0)
    ring.mark_full(1, [(0, 0)], 10)
    ring.free(1)
    assert ring.state(1) is SlotState.FREE


class Stores(mmap.mmap):
    """Memory of a journal that keeps what was stored where. `struct.pack_into` would come past it."""

    def __setitem__(self, place: Any, value: Any) -> None:
        self.seen: list[tuple[Any, Any]] = [*getattr(self, "seen", []), (place, value)]
        super().__setitem__(place, value)


def test_a_state_is_one_store_of_one_byte(directory: Path) -> None:
    """In two, the other process sees a state that nobody has set, and what it answers is overwritten by the second."""
    header = Header(CHUNK_BYTES, 2, 1)
    memory = Stores(-1, header.journal_bytes)
    Journal.write_header(memory, header)
    journal = Journal(memory, directory)
    place = HEADER_BYTES + RECORD_BYTES
    changes: list[tuple[Callable[[], None], SlotState]] = [
        (lambda: journal.mark_filling(1, 1, 5, 0), SlotState.FILLING),
        (lambda: journal.mark_full(1, [(0, 7)], 100), SlotState.FULL),
        (lambda: journal.free(1), SlotState.FREE),
    ]
    for change, state in changes:
        change()
        assert journal.state(1) is state
        assert memory.seen[-1] == (place, state)
    assert [value for where, value in memory.seen if where == place] == [1, 2, 0]


def _sources(count: int) -> list[tuple[int, int]]:
    return [(3 * rank, 7 * rank + 1) for rank in range(count)]


def _fill(ring: Ring, slot: int, count: int) -> None:
    ring.mark_filling(slot, 7, 1, 0)
    ring.mark_full(slot, _sources(count), 10)


def test_a_journal_whose_records_have_room_for_all_sources_is_of_version_1(
    ring: Ring, directory: Path
) -> None:
    _fill(ring, 0, SOURCES_INSIDE_MAX)
    assert list(ring.record(0).sources) == _sources(SOURCES_INSIDE_MAX)
    assert ring.record(1).state is SlotState.FREE, "the pairs did not spill into the next record"
    raw = struct.pack("<8sIIQQ", b"HFRING\r\n", 1, RING_CHUNKS, CHUNK_BYTES, 7)
    header = raw + struct.pack("<I", zlib.crc32(raw))
    assert (directory / "journal").read_bytes()[: len(header)] == header
    assert {path.name for path in directory.iterdir()} == {"ring", "journal", "identity"}


@pytest.mark.parametrize("count", [SOURCES_INSIDE_MAX + 1, 1100, SOURCES_MAX])
def test_more_sources_than_a_record_has_room_for_are_read_by_another_process(
    ring: Ring, directory: Path, count: int
) -> None:
    _fill(ring, 0, 2)
    _fill(ring, 1, count)
    ring.set_attempt(8)
    with Ring.attach(directory) as other:
        assert list(other.record(1).sources) == _sources(count)
        assert list(other.record(0).sources) == _sources(2)
        other.free(1)
        remains = other.remains_in(1)
        assert remains is not None
        assert list(remains.sources) == _sources(count)
        other.mark_filling(1, 8, 2, 3)
        assert other.remains_in(1) is None
        other.mark_full(1, _sources(3), 10)
        assert list(other.record(1).sources) == _sources(3), "the file of the chunk before is not this one's"
    version = struct.unpack_from("<I", (directory / "journal").read_bytes(), 8)
    assert version == (2,), "an older holdfast refuses it by its version"
    Ring.remove(directory)
    assert list(directory.iterdir()) == []


def test_more_sources_than_a_chunk_may_have_are_refused(ring: Ring) -> None:
    ring.mark_filling(0, 7, 1, 0)
    with pytest.raises(ProtocolError, match="16385 sources, expected 1 to 16384"):
        ring.mark_full(0, _sources(SOURCES_MAX + 1), 10)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "record 1: 1016 of 1100 sources are there"),
        (lambda path: path.write_bytes(path.read_bytes()[:-8]), "record 1: 1099 of 1100 sources"),
        (lambda path: path.write_bytes(path.read_bytes() + bytes(8)), "record 1: 1101 of 1100 sources"),
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), "record 1: content_crc"),
        (lambda path: (path.unlink(), path.symlink_to("/dev/zero")), "sources-1: cannot be opened"),
    ],
    ids=["gone", "short", "long", "of another chunk", "a link"],
)
def test_a_damaged_file_of_sources_costs_its_slot(
    ring: Ring, directory: Path, damage: Callable[[Path], object], message: str
) -> None:
    _fill(ring, 1, 1100)
    damage(directory / "sources-1")
    with pytest.raises(ProtocolError, match=message):
        ring.record(1)
    ring.free(1)
    assert ring.remains_in(1) is None
    _fill(ring, 1, 1100)
    assert list(ring.record(1).sources) == _sources(1100), "the slot serves again"


def test_a_record_torn_while_it_became_full_is_still_a_filling_one(ring: Ring, directory: Path) -> None:
    ring.mark_filling(0, 7, 3, 1)
    offset = HEADER_BYTES + 36
    with (directory / "journal").open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff" * 40)
    found = ring.record(0)
    assert (found.state, found.step, found.chunk, found.sources) == (SlotState.FILLING, 3, 1, ())


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, struct.pack("<I", 3), "record 1: state 3"),
        (8, struct.pack("<Q", 2**63), "record 1: place_crc"),
        (36, struct.pack("<I", 99), "record 1: content_crc"),
        (40, struct.pack("<I", 2**31), "record 1: sources 2147483648"),
        (40, struct.pack("<I", 0), "record 1: sources 0"),
        (44, struct.pack("<Q", 2**63), "record 1: nbytes 9223372036854775808"),
        (64, struct.pack("<I", 9), "record 1: content_crc"),
    ],
)
def test_damaged_record_names_file_record_and_field(
    ring: Ring, directory: Path, offset: int, data: bytes, message: str
) -> None:
    ring.mark_filling(1, 7, 3, 1)
    ring.mark_full(1, [(0, 1), (1, 2)], CHUNK_BYTES)
    with (directory / "journal").open("r+b") as file:
        file.seek(HEADER_BYTES + RECORD_BYTES + offset)
        file.write(data)
    with pytest.raises(ProtocolError, match=message) as caught:
        ring.records()
    assert str(directory / "journal") in str(caught.value)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=200,
    deadline=None,
)
@given(data=st.binary(min_size=68, max_size=96))
def test_any_bytes_in_a_record_give_a_record_or_our_error(ring: Ring, directory: Path, data: bytes) -> None:
    with (directory / "journal").open("r+b") as file:
        file.seek(HEADER_BYTES)
        file.write(bytes([data[0] % 3, 0, 0, 0]) + data[4:])
    try:
        found = ring.record(0)
    except ProtocolError:
        return
    assert found.nbytes <= CHUNK_BYTES


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"PK", "magic"),
        (8, struct.pack("<I", 9), "version 9"),
        (12, struct.pack("<I", 2**31), "header_crc"),
        (32, struct.pack("<I", 1), "header_crc"),
    ],
)
def test_attach_refuses_a_damaged_header(
    ring: Ring, directory: Path, offset: int, data: bytes, message: str
) -> None:
    with (directory / "journal").open("r+b") as file:
        file.seek(offset)
        file.write(data)
    with pytest.raises(ProtocolError, match=message):
        Ring.attach(directory)


def test_attach_refuses_files_of_the_wrong_size(ring: Ring, directory: Path) -> None:
    with (directory / "ring").open("r+b") as file:
        file.truncate(CHUNK_BYTES)
    with pytest.raises(ProtocolError, match="the journal says"):
        Ring.attach(directory)
    with (directory / "journal").open("r+b") as file:
        file.truncate(HEADER_BYTES + 10)
    with pytest.raises(ProtocolError, match="journal"):
        Ring.attach(directory)
    with (directory / "journal").open("r+b") as file:
        file.truncate(0)
    with pytest.raises(ProtocolError, match="empty"):
        Ring.attach(directory)


def test_attach_without_a_ring_says_so(directory: Path) -> None:
    with pytest.raises(ConfigError, match="no ring"):
        Ring.attach(directory)


def test_a_second_ring_in_the_same_directory_is_refused(ring: Ring, directory: Path) -> None:
    with pytest.raises(ConfigError, match="already has a ring"):
        Ring.create(directory, chunk_bytes=CHUNK_BYTES, ring_chunks=1, attempt=1)
    Ring.remove(directory)
    assert list(directory.iterdir()) == []


def test_links_strangers_and_open_directories_are_refused(
    tmp_path: Path, ring: Ring, directory: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(directory)
    with pytest.raises(ConfigError, match="link"):
        Ring.attach(link)
    directory.chmod(0o750)
    with pytest.raises(ConfigError, match="mode 0750"):
        Ring.attach(directory)
    directory.chmod(0o700)
    (directory / "journal").rename(directory / "real")
    (directory / "journal").symlink_to(directory / "real")
    with pytest.raises(ConfigError, match="cannot be opened"):
        Ring.attach(directory)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to somebody else")
def test_a_directory_of_another_user_is_refused(ring: Ring, directory: Path) -> None:
    os.chown(directory, 12345, 12345)
    with pytest.raises(ConfigError, match="owner 12345"):
        Ring.attach(directory)


def test_a_base_that_others_may_write_is_refused_unless_sticky(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    base.chmod(0o777)
    with pytest.raises(ConfigError, match="writable by others"):
        Ring.create(base / "run", chunk_bytes=CHUNK_BYTES, ring_chunks=1, attempt=1)
    base.chmod(0o1777)
    Ring.create(base / "run", chunk_bytes=CHUNK_BYTES, ring_chunks=1, attempt=1).close()


def test_too_little_memory_names_needed_and_free(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Small:
        f_bavail, f_bfree, f_blocks, f_frsize = 10, 10, 10, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Small)
    with pytest.raises(ConfigError, match=r"needs \d+ bytes .* 40960 bytes are free") as caught:
        Ring.create(directory, chunk_bytes=CHUNK_BYTES, ring_chunks=RING_CHUNKS, attempt=1)
    assert "ring_bytes" in str(caught.value)


def test_memory_that_runs_out_while_it_is_taken_leaves_no_ring(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match="No space left"):
        Ring.create(directory, chunk_bytes=CHUNK_BYTES, ring_chunks=RING_CHUNKS, attempt=1)
    assert not (directory / "ring").exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"version":1,"attempt":1,"step":-1}',
        '{"version":1,"attempt":7,"step":13,"state":"staged","layout_digest":"' + "a" * 64 + '"}',
        '{"version":1,"attempt":7,"step":12,"state":"done","layout_digest":"' + "a" * 64 + '"}',
        '{"version":1,"attempt":7,"step":12,"state":"staged","layout_digest":"../../x"}',
        "[" * 100_000,
    ],
)
def test_damaged_checkpoint_file_is_our_error(ring: Ring, directory: Path, text: str) -> None:
    (directory / "checkpoint-7-12.json").write_text(text)
    with pytest.raises(ProtocolError, match=r"checkpoint-7-12\.json"):
        ring.checkpoint(7, 12)


def test_layouts_are_checked_against_name_and_ring(ring: Ring, directory: Path) -> None:
    with pytest.raises(ProtocolError, match="chunk_bytes"):
        ring.put_layout(layout(4096))
    with pytest.raises(ProtocolError, match="64 hex digits"):
        ring.layout("../../../etc/passwd")
    with pytest.raises(ProtocolError, match="missing"):
        ring.layout("a" * 64)
    digest = layout().digest
    (directory / f"layout-{digest[:16]}").write_bytes(b"garbage")
    with pytest.raises(ProtocolError, match="cannot be read"):
        ring.layout(digest)
    other = Layout(10, CHUNK_BYTES, 1, ())
    (directory / f"layout-{digest[:16]}").write_bytes(other.to_bytes())
    with pytest.raises(ProtocolError, match="expected"):
        ring.layout(digest)


@pytest.mark.parametrize("slot", [-1, RING_CHUNKS, 2**63])
def test_slots_outside_the_ring_are_refused(ring: Ring, slot: int) -> None:
    for use in (ring.slot_memory, ring.record, ring.free, ring.state):
        with pytest.raises(ProtocolError, match="the ring has 4"):
            use(slot)


@pytest.mark.parametrize(
    ("chunk_bytes", "ring_chunks"), [(0, 1), (100, 1), (4096, 0), (2**40, 1), (4096, 2**30)]
)
def test_impossible_geometry_is_refused(directory: Path, chunk_bytes: int, ring_chunks: int) -> None:
    with pytest.raises(ProtocolError, match="chunk"):
        Ring.create(directory, chunk_bytes=chunk_bytes, ring_chunks=ring_chunks, attempt=1)


def test_attempt_can_be_raised_and_is_seen_by_who_attaches(ring: Ring, directory: Path) -> None:
    ring.set_attempt(9)
    with Ring.attach(directory) as other:
        assert other.attempt == 9


def test_runtime_directory_is_one_per_run(tmp_path: Path) -> None:
    plain = runtime_directory(str(tmp_path / "run"), tmp_path)
    assert plain == runtime_directory(f"file://{tmp_path}/run/", tmp_path)
    assert plain == runtime_directory(str(tmp_path / "run"), tmp_path, share=0)
    assert plain != runtime_directory(str(tmp_path / "run"), tmp_path, share=1)
    assert plain.parent == tmp_path
    assert runtime_directory("s3://bucket/run/") == runtime_directory("S3://bucket/run")
    assert runtime_directory("s3://bucket/run") != runtime_directory("s3://bucket/run2")
    assert runtime_directory("s3://bucket/run").parent == Path(f"/dev/shm/holdfast-{os.geteuid()}")


def test_a_stager_holds_its_ring_until_it_is_dead(directory: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from holdfast.ring.ring import Ring;"
        "ring = Ring.attach(Path(sys.argv[1])); ring.hold(7); print('held', flush=True); sys.stdin.read()"
    )
    with Ring.create(directory, chunk_bytes=4096, ring_chunks=2, attempt=7) as ring:
        assert not ring.is_held()
        stager = subprocess.Popen(
            [sys.executable, "-c", code, str(ring.directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        with stager:
            assert stager.stdout is not None
            assert stager.stdout.readline() == b"held\n"
            assert ring.is_held()
            stager.send_signal(signal.SIGSTOP)
            assert ring.is_held()
            stager.kill()
        assert not ring.is_held()
        ring.set_attempt(8)
        assert not ring.is_held()
        with Ring.attach(ring.directory) as mapped:
            mapped.hold(8)
            assert ring.is_held()
        assert not ring.is_held()
        Ring.remove(ring.directory)
        assert list(ring.directory.iterdir()) == []


def test_another_ring_has_another_identity(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        with Ring.create(tmp_path / "run", chunk_bytes=4096, ring_chunks=1, attempt=1) as ring:
            with Ring.attach(tmp_path / "run") as attached:
                assert attached.identity == ring.identity
            found.append(ring.identity)
        Ring.remove(tmp_path / "run")
        assert ring.identity == ""
    assert len({*found, ""}) == 3
    assert not list((tmp_path / "run").iterdir())
