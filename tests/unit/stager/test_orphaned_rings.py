"""Rings on this machine that flushers of other shares of a run have left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.image.shares import WHOLE, ShareNumber
from holdfast.ring.directory import runtime_directory
from holdfast.ring.ring import Ring
from holdfast.telemetry.status_socket import serve_status
from holdfast.telemetry.status_state import StatusState
from stager.orphaned_rings import orphaned_rings

URL = "s3://bucket/run"


@contextlib.contextmanager
def ring(base: Path, share: int, *, writers: int = 2, steps: int = 1) -> Iterator[Path]:
    """Left by the flusher of a share, from 0."""
    directory = runtime_directory(URL, base, share=share)
    directory.mkdir(mode=0o700)
    with Ring.create(directory, chunk_bytes=4096, ring_chunks=8, attempt=3) as made:
        made.record_writers(3, writers)
        for step in range(steps):
            made.write_checkpoint(3, step, "staged", "0" * 64, {})
        yield directory


def test_a_share_that_the_job_does_not_have_is_nobodys(tmp_path: Path) -> None:
    with ring(tmp_path, 0), ring(tmp_path, 1) as directory:
        (found,) = orphaned_rings(URL, tmp_path, WHOLE)
        assert found == (directory, ShareNumber(1, 2), False)
        assert found.command(URL) == f"holdfast flusher --store {URL} --share 2/2"


def test_a_share_that_the_job_has_gets_its_number_of_stagers(tmp_path: Path) -> None:
    with ring(tmp_path, 0), ring(tmp_path, 1), ring(tmp_path, 2, writers=4):
        found = orphaned_rings(URL, tmp_path, ShareNumber(0, 3))
        assert [one[1:] for one in found] == [(ShareNumber(1, 3), True), (ShareNumber(2, 3), True)]
        found = orphaned_rings(URL, tmp_path, ShareNumber(1, 2))
        assert [one[1:] for one in found] == [(ShareNumber(0, 2), True), (ShareNumber(2, 4), False)]


def test_a_ring_without_a_checkpoint_of_another_run_or_with_a_flusher_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "strange-2").mkdir()
    (tmp_path / f"{runtime_directory(URL, tmp_path).name}-3").mkdir(mode=0o755)
    with ring(tmp_path, 1, steps=0):
        assert orphaned_rings(URL, tmp_path, WHOLE) == []
    with (
        ring(tmp_path, 3) as directory,
        serve_status(directory, "flusher", StatusState("flusher", URL).build_document),
    ):
        assert orphaned_rings(URL, tmp_path, WHOLE) == []
    assert [one.directory for one in orphaned_rings(URL, tmp_path, WHOLE)] == [directory]


@pytest.mark.parametrize("share", ["0", "-1", "99999", "2x", "2-2"])
def test_a_directory_of_another_name_is_no_share(tmp_path: Path, share: str) -> None:
    lead = runtime_directory(URL, tmp_path)
    with ring(tmp_path, 1) as directory:
        directory.rename(directory.with_name(f"{lead.name}-{share}"))
        assert orphaned_rings(URL, tmp_path, WHOLE) == []
