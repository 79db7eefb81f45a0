"""Unchanged tensors are copied from the device once; a change that torch does not count is never missed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from holdfast.telemetry.causes import DeclineCause
from tests.late.control import LateMachine
from tests.late.whole_saves import MIRROR, DeviceRank, counted
from tests.unit.trainer_side.tiers.ranks import until

pytestmark = pytest.mark.late("lazy", "side_lazy")
BASE_BYTES = 4 << 20
HOLES_BYTES = 1 << 18  # gaps between small tensors are copied with them


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
    assert [before - copied[2] >= BASE_BYTES - HOLES_BYTES for before in copied] == [
        True,
        True,
        False,
        False,
        True,
        True,
    ]
    rank.checkpointer.close()


def one_number(base: torch.Tensor) -> None:
    base[12345] = 1


def two_rows_change_places(base: torch.Tensor) -> None:
    """Swap rows of one word, side by side; the other rows stay."""
    rows = base[: 1 << 10].view(-1, 2)
    rows[[6, 7]] = rows[[7, 6]]


@MIRROR
@pytest.mark.parametrize("change", [one_number, two_rows_change_places])
def test_a_change_that_torch_does_not_count_withdraws_the_step(
    change: Callable[[torch.Tensor], None], mirror: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any change through `.data`, however small."""
    rank = DeviceRank(monkeypatch, device_bytes_max=mirror, in_flight_max=1)
    rank.base().data.copy_(torch.arange(rank.base().numel()))
    for step in range(3):
        assert rank.save(step)
        rank.land(step)
    change(rank.base().data)
    rank.save(3)
    assert rank.checkpointer._copier._idle.wait(60)
    assert rank.link.declined[3].cause == DeclineCause.TORN
    assert "base was the same at the saves before" in rank.link.declined[3].text
    for step in (4, 5, 6, 7):
        rank.base().data[step] = step
        assert rank.save(step)
        rank.land(step)
    rank.checkpointer.close()


@MIRROR
def test_each_slot_of_a_tier_that_is_the_area_has_what_does_not_change(
    mirror: str, tmp_path: Path, tmpfs: Path, late: LateMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strategy D: the contents of one slot say nothing about another. The test reads the tier itself, slot by slot."""
    slots, saves, changed_at = 3, 18, 12
    rank = DeviceRank(
        monkeypatch,
        device_bytes_max=mirror,
        store=f"file://{tmp_path}/store",
        tiers=[f"memory:{tmpfs}"],
        tier_slots=slots,
        on_full="wait",
    )
    (tier,) = rank.checkpointer._tiers.tiers
    at: dict[int, list[int]] = {}
    copied = []
    for step in range(saves):
        if step in (0, changed_at):
            with torch.no_grad():
                rank.base().copy_(torch.arange(rank.base().numel()) + step)
        torch.cuda.synchronize()
        with counted(late, 0, rank.own_stream()) as streams:
            assert rank.save(step)
            rank.update()
            until(lambda: rank.checkpointer._tiers.is_idle)
        copied.append(sum(one.to_host for one in streams))
        (kept,) = (one for one in tier.kept_slices() if one.seal.step == step)
        at.setdefault(kept.slot, []).append(step)
        image = memoryview(bytearray(kept.layout.image_bytes))
        tier.read_into(kept, 0, image)
        assert rank.base().detach().cpu().numpy().tobytes() in bytes(image), f"step {step}, slot {kept.slot}"
    # Once into each slot, at least twice in all; and again after a change.
    wanted = {
        step: place < 1 or step - (0 if step < changed_at else changed_at) < 2
        for steps in at.values()
        for part in ([one for one in steps if (one < changed_at) is before] for before in (True, False))
        for place, step in enumerate(part)
    }
    least = min(copied)
    assert [nbytes - least >= BASE_BYTES - HOLES_BYTES for nbytes in copied] == [
        wanted[step] for step in range(saves)
    ]
    assert len(at) > 1
    assert not all(wanted.values())
    rank.checkpointer.close()
