"""The shares that wait for the next process of their stager."""

from __future__ import annotations

from holdfast.errors import PeerLost
from holdfast.image.save_record import SaveRecord
from holdfast.image.shares import LOST_STAGER_SECONDS_MAX
from holdfast.telemetry.causes import DeclineCause
from tests.unit.trainer_side.stager_port import LAYOUT, Source
from trainer_side.link.held_shares import HeldShares
from trainer_side.link.outgoing import Outgoing, SendPlan
from trainer_side.link.share_transfer import WholeTransfer
from trainer_side.transfer import Transfer, TransferState


def _held_share(step: int) -> Outgoing:
    source = Source(0)
    whole = WholeTransfer(Transfer(step, SaveRecord()), 2, lambda *_: None, source)
    outgoing = Outgoing(whole.shares[1], source, SendPlan.of(LAYOUT, 0))
    assert outgoing.transfer.hold()
    outgoing.release()
    return outgoing


def test_shares_that_were_not_offered_before_the_next_loss_stay_held() -> None:
    held = HeldShares(lambda: 0.0)
    held.hold([_held_share(1), _held_share(2)], PeerLost("the stager is dead"))
    step, again = next(held.drain())
    assert step == 1
    assert again is not None
    assert again.transfer.hold()
    held.hold([again], PeerLost("the stager is dead"))
    taken = list(held.drain())
    assert [step for step, _ in taken] == [1, 2]
    assert all(one is not None for _, one in taken)


def test_only_shares_whose_deadline_has_passed_fail() -> None:
    now = [0.0]
    held = HeldShares(lambda: now[0])
    early = _held_share(1)
    held.hold([early], PeerLost("the stager is dead"))
    now[0] = LOST_STAGER_SECONDS_MAX - 1
    again = [one for _, one in held.drain() if one is not None]
    assert again[0].transfer.hold()
    held.hold([*again, _held_share(2)], PeerLost("the stager is dead"))
    now[0] = LOST_STAGER_SECONDS_MAX + 1
    held.fail_expired()
    assert early.transfer.state is TransferState.FAILED
    assert [step for step, _ in held.drain()] == [2]


def test_held_shares_of_a_declined_step_are_not_offered_again() -> None:
    held, declined = HeldShares(lambda: 0.0), _held_share(1)
    held.hold([declined, _held_share(2)], PeerLost("the stager is dead"))
    held.decline(1, DeclineCause.TORN.because("a tensor was changed"))
    assert declined.transfer.state is TransferState.DECLINED
    assert [(step, one is None) for step, one in held.drain()] == [(1, True), (2, False)]
