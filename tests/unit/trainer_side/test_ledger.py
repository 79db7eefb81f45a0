"""The books count each step once, under the cause that was known first, and put right what was believed too early."""

from __future__ import annotations

import gc
import weakref

from holdfast.errors import PeerLost
from holdfast.telemetry.causes import DeclineCause, Reason
from trainer_side.ledger import Ledger
from trainer_side.transfer import Transfer, TransferState


def test_a_step_that_another_rank_declined_is_not_saved() -> None:
    ledger = Ledger()
    first, second, third = (Transfer(step, {}) for step in range(3))
    for transfer in (first, second, third):
        ledger.begun(transfer)
    assert (ledger.stats.saved, ledger.stats.declined) == (3, 0)
    assert not ledger.summary()
    first.reach(TransferState.DURABLE)
    second.reach(TransferState.DECLINED, DeclineCause.BUSY.because("still being sent").of_rank(1))
    third.reach(TransferState.STAGED)
    assert (ledger.stats.saved, ledger.stats.declined) == (2, 1)
    third.reach(TransferState.FAILED, Reason.of_error(PeerLost("the flusher ended")))
    ledger.declined("busy")
    stats = ledger.stats
    assert (stats.saved, stats.declined, stats.failed) == (1, 2, 1)
    assert ledger.summary() == "3 of 4 steps were not checkpointed: 2 busy, 1 a process was lost or late"


def test_steps_that_have_ended_take_no_memory_though_nobody_asks_for_the_stats() -> None:
    ledger, seen = Ledger(), []
    for step in range(20):
        transfer = Transfer(step, {})
        seen.append(weakref.ref(transfer))
        ledger.begun(transfer)
        transfer.reach(TransferState.DURABLE)
    del transfer
    gc.collect()
    assert sum(reference() is not None for reference in seen) == 1
    assert ledger.stats.saved == 20
