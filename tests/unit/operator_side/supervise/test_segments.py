"""The folder of MPI's shared-memory files is there while it is needed, and taken away by whoever comes after."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

from operator_side.supervise.segments import Segments

VARIABLE = "OMPI_MCA_btl_sm_backing_directory"


def _ring(tmp_path: Path) -> Path:
    base = tmp_path / "runtime"
    base.mkdir(mode=0o700)
    return base / "0123456789abcdef"


def test_it_is_named_to_the_job_is_private_and_goes(tmp_path: Path) -> None:
    ring = _ring(tmp_path)
    segments = Segments(ring)
    environment = segments.make({"A": "1"})
    folder = Path(environment[VARIABLE])
    assert environment["A"] == "1"
    assert folder == ring.with_name(f"{ring.name}-mpi-{os.getpid()}")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "sm_segment.0").write_bytes(b"left by a killed rank")
    segments.remove()
    assert not folder.exists()
    segments.remove()  # safe to call twice


def test_what_a_killed_supervisor_has_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
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
    Segments(ring).make({})
    assert not dead.exists()
    assert living.exists(), "another supervisor of this run: its job may live"
    assert another_run.exists()
    assert strange.exists()


def test_a_place_that_somebody_has_chosen_is_left(tmp_path: Path) -> None:
    ring = _ring(tmp_path)
    assert Segments(ring).make({VARIABLE: "/elsewhere"}) == {VARIABLE: "/elsewhere"}
    assert list(ring.parent.iterdir()) == []
