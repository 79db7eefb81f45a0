"""What does not change crosses from the device once; what changes unseen by torch is never taken for the same."""

from __future__ import annotations

import pytest
import torch

from holdfast.telemetry.causes import DeclineCause
from tests.late.control import LateMachine
from tests.late.whole_saves import DeviceRank, counted

pytestmark = pytest.mark.late("lazy", "side_lazy")
BASE_BYTES = 4 << 20
MIRROR = pytest.mark.parametrize("mirror", ["0", "1GiB"], ids=["C", "mirror"])


@MIRROR
def test_frozen_parameters_are_copied_while_they_are_not_known_and_when_they_have_changed(
    mirror: str, late: LateMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = DeviceRank(monkeypatch, device_bytes_max=mirror, in_flight_max=1)
    copied = []
    for step in range(6):
        if step == 4:
            with torch.no_grad():
                rank.base()[-1] = 7
        torch.cuda.synchronize()
        with counted(late, 0, rank.own_stream()) as streams:
            assert rank.save(step)
            rank.update()
            rank.land(step)
        copied.append(sum(one.to_host for one in streams))
    assert [before - copied[2] >= BASE_BYTES for before in copied] == [True, True, False, False, True, True]
    rank.checkpointer.close()


@MIRROR
def test_a_change_that_torch_does_not_count_withdraws_the_step(
    mirror: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is, and however little: here one number, through `.data`."""
    rank = DeviceRank(monkeypatch, device_bytes_max=mirror, in_flight_max=1)
    for step in range(3):
        assert rank.save(step)
        rank.land(step)
    rank.base().data[12345] = 1
    rank.save(3)
    assert rank.checkpointer._copier._idle.wait(60)
    assert rank.link.declined[3].cause == DeclineCause.TORN
    assert "base was the same at the saves before" in rank.link.declined[3].text
    for step in (4, 5, 6, 7):
        rank.base().data[step] = step
        assert rank.save(step)
        rank.land(step)
    rank.checkpointer.close()
