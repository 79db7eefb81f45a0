"""The states of one checkpoint's shares, and the state of the whole that follows from them."""

from __future__ import annotations

import pytest

from holdfast.image.save_record import SaveRecord
from holdfast.telemetry.causes import DeclineCause
from trainer_side.link.share_transfer import WholeTransfer
from trainer_side.transfer import Transfer, TransferState

OFFERED, SENDING, SENT = TransferState.OFFERED, TransferState.SENDING, TransferState.SENT
STAGED, DURABLE = TransferState.STAGED, TransferState.DURABLE
DECLINED, FAILED = TransferState.DECLINED, TransferState.FAILED


class Told:
    """A whole of three shares, and the states that it has reached."""

    def __init__(self) -> None:
        self.reached: list[TransferState] = []
        self.whole = WholeTransfer(Transfer(7, SaveRecord(saved_at_unix=1.0)), 3, self._changed)

    def _changed(self, _: WholeTransfer, reached: TransferState | None) -> None:
        if reached is not None:
            self.reached.append(reached)

    def say(self, index: int, state: TransferState) -> None:
        reason = DeclineCause.LATE.because("of the test") if state in (DECLINED, FAILED) else None
        self.whole.shares[index].set_state(state, reason)


@pytest.mark.parametrize(
    ("said", "reached"),
    [
        ([(0, SENDING), (1, SENDING)], [SENDING]),
        ([(0, SENT), (1, SENT), (2, SENT)], [SENDING, SENT]),
        ([(0, STAGED), (2, STAGED), (1, STAGED)], [SENDING, STAGED]),
        ([(0, STAGED), (1, STAGED), (2, STAGED), (1, DURABLE), (0, DURABLE)], [SENDING, STAGED, DURABLE]),
        ([(1, SENT), (0, DURABLE)], [SENDING, DURABLE]),
        ([(1, STAGED), (2, DECLINED), (0, STAGED)], [SENDING, DECLINED]),
        ([(0, STAGED), (1, STAGED), (2, STAGED), (1, FAILED)], [SENDING, STAGED, FAILED]),
        ([(1, FAILED), (0, DURABLE)], [FAILED]),
        ([(0, DURABLE), (1, FAILED)], [DURABLE]),
    ],
)
def test_the_state_of_the_whole_follows_from_those_of_its_shares(
    said: list[tuple[int, TransferState]], reached: list[TransferState]
) -> None:
    told = Told()
    for index, state in said:
        told.say(index, state)
    assert told.reached == reached
    assert told.whole.is_durable == ((0, DURABLE) in said)


@pytest.mark.parametrize("end", [STAGED, FAILED])
def test_the_memory_is_free_when_no_share_reads_it_and_the_step_is_settled(end: TransferState) -> None:
    told = Told()
    for share in told.whole.shares[1:]:
        share.release()
    for index in range(3):
        told.say(index, end)
        assert not told.whole.transfer.released.is_set()
    told.whole.shares[0].release()
    assert told.whole.transfer.released.is_set()


def test_sent_memory_is_kept_while_a_share_may_still_fail() -> None:
    told = Told()
    for share in told.whole.shares:
        share.set_state(SENT)
        share.release()
    assert not told.whole.transfer.released.is_set()


def test_the_lead_is_told_of_the_whole_save_and_the_others_of_their_share() -> None:
    told = Told()
    told.whole.transfer.fingerprints = "prints"
    told.whole.transfer.record.copy_seconds = 2.0
    words = [share.final_message() for share in told.whole.shares]
    assert "prints" in words[0].values()
    assert words[0]["copy_seconds"] == 2.0
    assert all(not {"copy_seconds"} & other.keys() and "prints" not in other.values() for other in words[1:])
