"""The books count each step once, under the cause that was known first, and put right what was believed too early."""

from __future__ import annotations

import pytest

from trainer_side.ledger import Ledger, cause_of
from trainer_side.transfer import Transfer, TransferState


@pytest.mark.parametrize(
    ("reason", "code", "cause"),
    [
        ("busy: the checkpoint before is still being sent", "", "busy"),
        ("rank 12: busy: the checkpoint before is still being sent", "", "busy"),
        ("rank 1: copy failed: no memory: none", "", "copy failed"),
        ("steps 3, 4 are still being received", "busy", "no room at the stager"),
        ("step 5: rank 1 is dead: it seems", "peer_lost", "a process was lost or late"),
        ("something", "fenced", "fenced"),
        ("Anything else", "", "other"),
    ],
)
def test_causes(reason: str, code: str, cause: str) -> None:
    assert cause_of(reason, code) == cause


def test_a_step_that_another_rank_declined_is_not_saved() -> None:
    ledger = Ledger()
    first, second, third = (Transfer(step, {}) for step in range(3))
    for transfer in (first, second, third):
        ledger.begun(transfer)
    assert (ledger.stats.saved, ledger.stats.declined) == (3, 0)
    assert not ledger.summary()
    first.reach(TransferState.DURABLE)
    second.reach(TransferState.DECLINED, "rank 1: busy: the checkpoint before is still being sent")
    third.reach(TransferState.STAGED)
    assert (ledger.stats.saved, ledger.stats.declined) == (2, 1)
    third.reach(TransferState.FAILED, "the flusher ended", "peer_lost")
    ledger.declined("busy")
    stats = ledger.stats
    assert (stats.saved, stats.declined, stats.failed) == (1, 2, 1)
    assert ledger.summary() == "3 of 4 steps were not checkpointed: 2 busy, 1 a process was lost or late"
