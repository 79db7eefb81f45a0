"""The event for a step that no rank keeps in a tier."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from holdfast.telemetry.causes import DeclineCause, Reason
from holdfast.telemetry.events import EventLog
from holdfast.wire.frames import decode
from tests.support.events import read_events
from trainer_side.ledger import Ledger
from trainer_side.tiers.local_tiers import TierReport
from trainer_side.tiers.tier import StepVerdict, Tier

TIER = cast(Tier, SimpleNamespace(name="nvme"))


@pytest.mark.parametrize(
    ("why", "told"),
    [
        (DeclineCause.BUSY.because("no slot is free"), ["busy"]),
        (DeclineCause.FAILED.because("/mnt/a: busy: of a path"), ["failed"]),  # the cause, not the sentence
    ],
)
def test_a_void_step_is_logged_with_its_cause(why: Reason, told: list[str], tmp_path: Path) -> None:
    path = tmp_path / "events"
    report = TierReport(0, Ledger(), EventLog(path, role="trainer", rank=0))
    frame = StepVerdict(0, (1, 7), complete=False, why=why.with_rank(2)).to_frame()
    report.report_verdict(TIER, StepVerdict.from_frame(decode(frame)))
    assert [line["cause"] for line in read_events(path) if line["event"] == "void"] == told
