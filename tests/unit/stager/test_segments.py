"""The next stager removes a killed job's leftovers in shared memory, and nothing else."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from stager import segments as module
from stager.segments import SegmentList, mapped_segments

MAPS = """\
7f9ce9000000-7f9cea000000 rw-s 00000000 fe:00 2329431                    /dev/shm/sm_segment.vm.0.2eca0001.1
7f9cea000000-7f9ceb000000 rw-s 00000000 fe:00 2328406                    /dev/shm/sm_segment.vm.0.2eca0001.0
7f9cea000000-7f9ceb000000 r--s 00001000 fe:00 2328406                    /dev/shm/sm_segment.vm.0.2eca0001.0
7f9ceb000000-7f9cec000000 rw-s 00000000 fe:00 2329377                    /dev/shm/holdfast-0/ring
7f9cec000000-7f9ced000000 rw-p 00000000 00:00 0
7f9ced000000-7f9cee000000 rw-p 00000000 00:00 0                          [heap]
"""


def _dead(base: Path, listed: object) -> Path:
    path = base / "mpi-segments-1"
    path.write_text(listed if isinstance(listed, str) else json.dumps(listed))
    return path


def test_mapped_segments_are_read_from_the_maps_of_a_process() -> None:
    assert mapped_segments(MAPS) == [
        "/dev/shm/sm_segment.vm.0.2eca0001.1",
        "/dev/shm/sm_segment.vm.0.2eca0001.0",
    ]


def test_a_dead_stagers_segments_are_removed_and_nothing_else(tmp_path: Path) -> None:
    segment, other = tmp_path / "sm_segment.vm.0.1.0", tmp_path / "other"
    link = tmp_path / "sm_segment.vm.0.1.1"
    for path in (segment, other):
        path.write_bytes(b"x")
    link.symlink_to(other)
    path = _dead(tmp_path, [str(segment), str(other), str(link), "relative/sm_segment.x", 3])
    segments = SegmentList(tmp_path)
    assert not segment.exists()
    assert not path.exists()
    assert other.exists()
    assert link.is_symlink()
    assert (tmp_path / f"mpi-segments-{os.getpid()}").exists()
    segments.close()
    assert sorted(tmp_path.iterdir()) == sorted([other, link])


def test_a_living_stagers_segments_stay(tmp_path: Path) -> None:
    segment = tmp_path / "sm_segment.vm.0.1.0"
    segment.write_bytes(b"x")
    path = _dead(tmp_path, [str(segment)])
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        SegmentList(tmp_path).close()
    assert segment.exists()
    assert path.exists()


def test_a_stagers_own_segments_are_removed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment, maps = tmp_path / "sm_segment.vm.0.1.0", tmp_path / "maps"
    segment.write_bytes(b"x")
    maps.write_text(f"7f9c-7f9d rw-s 00000000 fe:00 2329431    {segment}\n")
    monkeypatch.setattr(module, "_MAPS", maps)
    segments = SegmentList(tmp_path / "base")
    assert segment.exists()
    segments.close()
    assert not segment.exists()
    assert not list((tmp_path / "base").iterdir())


def test_a_list_that_is_none_is_removed(tmp_path: Path) -> None:
    path = _dead(tmp_path, "[not json")
    segments = SegmentList(tmp_path)
    assert not path.exists()
    segments.close()


def test_a_directory_that_cannot_be_used_hinders_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"x")
    SegmentList(tmp_path / "file").close()
    assert f"cannot be removed in {tmp_path / 'file'}" in caplog.text
    assert (tmp_path / "file").read_bytes() == b"x"
