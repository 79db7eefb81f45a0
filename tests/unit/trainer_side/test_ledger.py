"""The ledger counts each step once, under the first known cause, and corrects premature verdicts."""

from __future__ import annotations

import gc
import weakref
from typing import Any, cast

from holdfast.errors import PeerLost, StateError
from holdfast.image.save_record import SaveRecord
from holdfast.telemetry.causes import DeclineCause, Reason
from trainer_side.ledger import Ledger
from trainer_side.tiers.tier_write import TierWrite
from trainer_side.transfer import Transfer, TransferState


def test_a_step_that_another_rank_declined_is_not_saved() -> None:
    ledger = Ledger()
    first, second, third = (Transfer(step, SaveRecord()) for step in range(3))
    for transfer in (first, second, third):
        ledger.record_begun(transfer)
    assert (ledger.stats.saved, ledger.stats.declined) == (3, 0)
    assert not ledger.summary()
    first.set_state(TransferState.DURABLE)
    second.set_state(TransferState.DECLINED, DeclineCause.BUSY.because("still being sent").with_rank(1))
    third.set_state(TransferState.STAGED)
    assert (ledger.stats.saved, ledger.stats.declined) == (2, 1)
    third.set_state(TransferState.FAILED, Reason.from_error(PeerLost("the flusher ended")))
    ledger.record_declined("busy")
    stats = ledger.stats
    assert (stats.saved, stats.declined, stats.failed) == (1, 2, 1)
    assert ledger.summary() == "3 of 4 steps were not checkpointed: 2 busy, 1 a process was lost or late"


def test_steps_that_have_ended_take_no_memory_though_nobody_asks_for_the_stats() -> None:
    ledger, seen = Ledger(), []
    for step in range(20):
        transfer = Transfer(step, SaveRecord())
        seen.append(weakref.ref(transfer))
        ledger.record_begun(transfer)
        transfer.set_state(TransferState.DURABLE)
    del transfer
    gc.collect()
    assert sum(reference() is not None for reference in seen) == 1
    assert ledger.stats.saved == 20


def _kept(ledger: Ledger, step: int) -> TierWrite:
    """A step that this rank has in a local tier, in a job without a stager."""
    tier_write = TierWrite((1, step), (), SaveRecord(), {0: cast(Any, None)})
    ledger.record_begun(Transfer.not_sent(step, SaveRecord()), tier_write)
    return tier_write


def test_a_step_that_all_ranks_refuse_counts_as_failed_whenever_that_is_heard() -> None:
    ledger, differ = Ledger(), Reason.from_error(StateError("rank 1 has drifted"))
    early = _kept(ledger, 1)
    ledger.record_refused(1, differ)
    assert (ledger.stats.saved, ledger.stats.failed) == (1, 0), "a tier still reads its area"
    early.finish_in(0, DeclineCause.VOID.because("of all ranks"))
    assert ledger.stats.failed == 1
    _kept(ledger, 2).finish_in(0)
    assert (ledger.stats.saved, ledger.stats.failed) == (1, 1)
    ledger.record_refused(2, differ)
    ledger.record_refused(2, differ)  # each tier's verdict says it
    assert (ledger.stats.saved, ledger.stats.failed) == (0, 2)
    ledger.record_refused(3, differ)  # the copy thread is quicker than the training thread
    _kept(ledger, 3).finish_in(0)
    assert (ledger.stats.saved, ledger.stats.failed, ledger.stats.declined) == (0, 3, 0)
    assert ledger.stats.causes == {"the ranks' states differ": 3}


def test_a_step_that_the_stager_made_durable_is_not_refused() -> None:
    ledger = Ledger()
    transfer = Transfer(1, SaveRecord())
    ledger.record_begun(transfer)
    transfer.set_state(TransferState.DURABLE)
    ledger.record_refused(1, Reason.from_error(StateError("rank 1 has drifted")))
    assert (ledger.stats.saved, ledger.stats.failed) == (1, 0)
