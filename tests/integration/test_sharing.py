"""Restore over real MPI: pieces of all sizes, on a different number of ranks than saved them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.mpirun import mpirun_command
from tests.integration.jobs import sharing
from tests.support.job import environment
from tests.support.restoring import publish

pytestmark = [pytest.mark.mpi]
CHUNK_BYTES = 1 << 18


def test_three_ranks_share_what_two_saved(tmp_path: Path) -> None:
    manifest = publish(tmp_path / "run", 5, sharing.state(), ranks=2, chunk_bytes=CHUNK_BYTES)
    command = mpirun_command(3, [sys.executable, sharing.__file__, str(tmp_path / "run"), str(tmp_path)])
    done = subprocess.run(
        command,
        env=environment(tmp_path / "runtime"),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert all(all(report["same"]) for report in reports)
    assert sum(report["bytes_read"] for report in reports) == manifest.image_bytes
    assert all(report["bytes_read"] <= manifest.image_bytes / 3 + CHUNK_BYTES for report in reports)
    chunks = len(manifest.chunk_crc32s)
    assert sum(report["requests"] for report in reports) == chunks + 2  # and head and tail
