"""The flusher of a supervised run: kept until released, and gone when its process is."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

from holdfast.ring.ring_keeper import is_ring_kept
from operator_side.supervise.flusher import KeptFlusher, SegmentFolder

_GIVES_BACK_FIRST = """
import os, sys, time
from pathlib import Path
file = Path(sys.argv[1]) / "flusher.pid"
file.write_text(f"{os.getpid()}\\n")
print(flush=True)
sys.stdin.readline()
file.unlink()
print(flush=True)
sys.stdin.readline()
"""


def test_a_flusher_is_waited_for_until_its_process_is_gone_not_its_files(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    kept = KeptFlusher(directory)
    line = [sys.executable, "-c", _GIVES_BACK_FIRST, str(directory)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        assert is_ring_kept(directory)
        kept.release()
        assert not is_ring_kept(directory)
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        assert not (directory / "flusher.pid").exists()
        assert not kept.wait_for_exit(0)
        process.stdin.close()
        # Nobody has waited for it yet: it is a zombie, and counts as gone.
        assert kept.wait_for_exit(60)


def test_where_there_is_none_nothing_is_waited_for(tmp_path: Path) -> None:
    kept = KeptFlusher(tmp_path / "run")
    kept.release()
    assert kept.wait_for_exit(60)
    assert not kept.has_leftover_ring
    kept.release()
    assert not (tmp_path / "run").exists()


VARIABLE = "OMPI_MCA_btl_sm_backing_directory"


def _ring(tmp_path: Path) -> Path:
    base = tmp_path / "runtime"
    base.mkdir(mode=0o700)
    return base / "0123456789abcdef"


def test_the_segment_folder_is_private_named_to_the_job_and_removed(tmp_path: Path) -> None:
    ring = _ring(tmp_path)
    segments = SegmentFolder(ring)
    environment = segments.prepare({"A": "1"})
    folder = Path(environment[VARIABLE])
    assert environment["A"] == "1"
    assert folder == ring.with_name(f"{ring.name}-mpi-{os.getpid()}")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "sm_segment.0").write_bytes(b"left by a killed rank")
    segments.remove()
    assert not folder.exists()
    segments.remove()  # safe to call twice


def test_a_killed_supervisors_folder_is_removed_by_the_next_one(tmp_path: Path) -> None:
    ring = _ring(tmp_path)
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead = ring.with_name(f"{ring.name}-mpi-{ended.pid}")
    living = ring.with_name(f"{ring.name}-mpi-{os.getppid()}")
    another_run = ring.with_name(f"fedcba9876543210-mpi-{ended.pid}")
    strange = ring.with_name(f"{ring.name}-mpi-notes")
    for folder in (dead, living, another_run, strange):
        folder.mkdir()
        (folder / "sm_segment.0").write_bytes(b"x")
    SegmentFolder(ring).prepare({})
    assert not dead.exists()
    assert living.exists(), "another supervisor of this run: its job may live"
    assert another_run.exists()
    assert strange.exists()


def test_a_place_that_somebody_has_chosen_is_left(tmp_path: Path) -> None:
    ring = _ring(tmp_path)
    assert SegmentFolder(ring).prepare({VARIABLE: "/elsewhere"}) == {VARIABLE: "/elsewhere"}
    assert list(ring.parent.iterdir()) == []
