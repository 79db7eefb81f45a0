"""A client of a real NFSv4.1 mount loses power in the middle of a checkpoint: acknowledged checkpoints survive."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.checkpoints.catalog import Catalog
from holdfast.checkpoints.verification import verify_file
from holdfast.store import open_store
from holdfast.store.names import TEMPORARY
from tests.nfs.machine import Guest, missing_parts, running_ganesha

_WHY_NOT = missing_parts()
pytestmark = [pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)]

_MANY = 1000
_CUTS = ("part {step} 2", "publish {step}", "part {step} 0", "manifest {step}")
"""Last words of each guest, about the checkpoint after the first that it acknowledged."""


def _listed(run: Path) -> set[int]:
    """The steps that the server's disk lists. Each is whole: every byte of it is read and checked."""
    items = Catalog(open_store(str(run))).list()
    for item in items:
        assert item.manifest is not None, f"{item.name}: {item.fault}"
        assert not item.fault, f"{item.name}: {item.fault}"
        report = verify_file(open_store(str(run)), item.manifest)
        assert report.ok, report.summary()
    return {item.step for item in items}


def _unfinished(run: Path) -> list[str]:
    return sorted(path.name for path in (run / TEMPORARY).glob("*"))


@pytest.mark.timeout(1800)
def test_a_power_cut_takes_no_acknowledged_checkpoint_and_leaves_none_in_part(tmp_path: Path) -> None:
    acknowledged: set[int] = set()
    cut_with_unfinished = 0
    with running_ganesha(tmp_path) as server:
        run = server.exported / "training"
        step = 1
        for cut in _CUTS:
            left = _unfinished(run)
            guest = Guest(tmp_path, server.port, first=step, count=_MANY)
            try:
                assert guest.wait_for_number("swept") == len(left), f"left by the guest before: {left}"
                guest.wait_for(f"durable {step}")
                guest.wait_for(cut.format(step=step + 1))
            finally:
                said = guest.kill()
            assert any("nfs4" in line and "vers=4.1" in line for line in said if line.startswith("mounted"))
            acknowledged |= guest.durable_steps()
            listed = _listed(run)
            assert acknowledged <= listed
            # At most one: its manifest was written, and its acknowledgement was still under way.
            assert len(listed - acknowledged) <= 1
            acknowledged |= listed
            cut_with_unfinished += bool(_unfinished(run))
            step = max(listed) + 1
        assert cut_with_unfinished >= 1, (
            "no guest was cut in the middle of a file; the test has shown nothing"
        )

        last = Guest(tmp_path, server.port, first=step, count=2)
        try:
            last.wait_for("ended")
            last.wait_ended()
        finally:
            last.kill()
        assert _listed(run) == acknowledged | {step, step + 1}
        assert _unfinished(run) == []
    told = subprocess.run(
        [Path(sys.executable).with_name("holdfast"), "verify", run, "--all", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    document = json.loads(told.stdout)
    assert document["ok"] is True
    assert {checkpoint["step"] for checkpoint in document["checkpoints"]} == acknowledged | {step, step + 1}
