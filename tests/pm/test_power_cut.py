"""A machine with persistent memory loses power in the middle of a slice: complete slices survive, whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pm.machine import Guest, build_disk, missing_parts

_WHY_NOT = missing_parts()
pytestmark = [pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)]

_CUTS = ("complete 1.3", "complete 2.1", "complete 3.2")
_MANY = 100_000


@pytest.mark.timeout(1800)
def test_a_power_cut_takes_no_complete_step(tmp_path: Path) -> None:
    disk = build_disk(tmp_path)
    complete: tuple[int, ...] = (0, 0)
    for attempt, cut in enumerate((*_CUTS, ""), start=1):
        guest = Guest(tmp_path, disk, attempt=attempt, count=_MANY if cut else 1)
        try:
            assert "dax=always" in guest.wait_for("mounted")
            assert guest.wait_for("how").startswith("how libpmem, MAP_SYNC"), guest.said
            _, _, *kept = guest.wait_for("kept").split()
            guest.wait_for(cut or f"complete {attempt}.1")
        finally:
            said = guest.kill()
        found = [tuple(int(number) for number in order.split(".")) for order in kept]
        if attempt > 1:
            assert found, f"{complete} was complete"
            assert max(found) >= complete, f"{complete} was complete, found are {found}"
        complete = max(
            tuple(int(number) for number in line.split()[1].split("."))
            for line in said
            if line.startswith("complete")
        )
