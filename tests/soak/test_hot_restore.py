"""Nightly, more of tests/integration/test_hot_restore.py."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from holdfast.ring.ring import Ring
from tests.integration.test_hot_restore import RING, Machine, _check, machine
from tests.support.job import REPOSITORY

pytestmark = [pytest.mark.mpi]

FILE_BYTES_MAX = 16 << 10


def test_a_staged_checkpoint_is_restored_while_the_store_takes_nothing(tmp_path: Path) -> None:
    site, store = REPOSITORY / "tests" / "support" / "fsspec_site", tmp_path / "store"
    machine = Machine(tmp_path, f"elsewhere://{store}", {"PYTHONPATH": f"{site}{os.pathsep}{REPOSITORY}"})
    machine.launch("save", "durable", "2")
    machine.wait_until_free()
    flusher = psutil.Process(int((machine.directory / "flusher.pid").read_text()))
    try:
        # Claims and manifests fit, parts do not.
        flusher.rlimit(psutil.RLIMIT_FSIZE, (FILE_BYTES_MAX, psutil.RLIM_INFINITY))
        machine.launch("save", "staged", "3")
        found = _check(machine.launch("restore"), 0, 3)
        assert [one["in_store"] for one in found] == [False, False]
        assert [one["store_requests"] for one in found] == [0, 0]
        assert all(one["sources"].keys() == {RING} for one in found)
        with Ring.attach(machine.directory) as ring:
            assert [step for _, step in ring.checkpoint_ids()] == [3], "it waits for the store all the while"
    finally:
        flusher.kill()
    assert [path.name for path in store.glob("step-*[0-9].json")] == ["step-000000002.json"]
