"""A call that does not return marks its tier as hanging, once, until the call returns."""

from __future__ import annotations

import pytest

from holdfast.telemetry.causes import Reason
from trainer_side.tiers.tier_writer_threads import TierCalls


def _state(calls: TierCalls) -> Reason | None:
    return calls.hang_reason


def test_a_late_call_is_news_once_and_its_return_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    calls = TierCalls("nvme:/x", 3, seconds_max=60.0)
    with calls.track("the seal of step 7"):
        assert calls.check_overdue() is None
    with calls.track("the seal of step 7", seconds_max=-1.0):
        hangs = calls.check_overdue()
        assert hangs is not None
        assert hangs.cause == "hangs"
        assert calls.check_overdue() is None, "it is no news any more"
        assert _state(calls) is hangs
    assert calls.check_overdue() is None
    assert _state(calls) is None
    assert (
        caplog.text.count(
            "rank 3: tier nvme:/x takes nothing until its device answers: it hangs: the seal of"
        )
        == 1
    )
    assert caplog.text.count("rank 3: tier nvme:/x answers again") == 1
