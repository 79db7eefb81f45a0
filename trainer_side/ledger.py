"""The ledger of this rank: how each `save()` ended, and why.

    save ── begun ──► pending ── staged, durable ──► saved
      │                  └────── another rank declined it, the stager failed it,
      │                          the ranks' replicas differ and are refused ──────► declined, failed ┐
      └── declined here ─────────────────────────────────────────────────────────► declined         ┴─► causes, counted

A rank that has begun a step may learn later, from the stager, that another rank had no room for it. The counts are
final for steps that have a verdict; once every step has one, all ranks count the same steps.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass, field

from holdfast.telemetry.causes import OTHER, DeclineCause, Reason
from trainer_side.tiers.tier_write import TierWrite
from trainer_side.transfer import Transfer, TransferState

_REFUSABLE_MAX = 64  # remembered steps without a stager, which the ranks may still refuse together


@dataclass
class Stats:
    """Counts and times of the checkpoints that this rank has begun, ended and declined so far.

    Attributes:
        saved: Steps that were saved, as far as this rank knows.
        declined: Steps that this rank, another rank or the stager declined, for lack of room or another cause.
        failed: Steps that were begun, and given up in flight; also those of which a rank's copy was torn.
        causes: Why steps were declined or failed: cause → how many.
        cst_seconds: Checkpoint stall time of each save that was begun: the time in `save()` and at the gate.
        wait_seconds: How much of it was spent waiting for room, with `on_full="wait"`.
        compared: Saves after which the whole state was compared with its copy, before the next update.
        compare_seconds: How long these comparisons stalled training, in total.
        stager_losses: How often this rank has lost its stager.
        stager_lost_seconds: How long it has been without one, including a current loss.
        kept: Local tier → how many slices this rank has sealed in it.
        skipped: `TIER: CAUSE` → how many steps the tier did not keep for this cause.
    """

    saved: int = 0
    declined: int = 0
    failed: int = 0
    causes: dict[str, int] = field(default_factory=dict)
    cst_seconds: list[float] = field(default_factory=list)
    wait_seconds: float = 0.0
    compared: int = 0
    compare_seconds: float = 0.0
    stager_losses: int = 0
    stager_lost_seconds: float = 0.0
    kept: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)


class Ledger:
    """Counts of one rank. Training thread, except `add_stall`, `record_kept`, `record_skipped` and `record_refused`."""

    def __init__(self) -> None:
        self._stats = Stats()
        self._causes: Counter[str] = Counter()
        self._pending: list[tuple[Transfer, TierWrite | None]] = []
        self._kept: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._refused: dict[int, Reason] = {}
        self._refusable: deque[int] = deque(maxlen=_REFUSABLE_MAX)  # counted as saved, in local tiers alone
        self._lock = threading.Lock()

    @property
    def stats(self) -> Stats:
        self._count_ended()
        self._stats.causes = dict(self._causes.most_common())
        with self._lock:
            self._stats.kept, self._stats.skipped = dict(self._kept), dict(self._skipped)
        return self._stats

    def _count_ended(self) -> None:
        """Count the outcomes of steps that were begun and have ended, and forget these steps."""
        with self._lock:
            refused = set(self._refused)
        pending = []
        for transfer, tier_write in self._pending:
            in_tiers = tier_write is not None and not tier_write.released.is_set()
            if not transfer.ended.is_set() or (transfer.state is not TransferState.DURABLE and in_tiers):
                pending.append((transfer, tier_write))
            elif transfer.state is TransferState.DURABLE:
                continue
            elif transfer.step in refused:
                self._refuse(transfer.step)
            elif tier_write is not None and tier_write.kept_in:
                self._refusable.append(transfer.step)
            else:
                self._stats.saved -= 1
                reason = transfer.reason
                if reason is None and tier_write is not None:
                    reason = next(iter(tier_write.lost_in.values()), None)
                self._count_missing(OTHER if reason is None else reason.cause, transfer.state)
        self._pending = pending
        for step in refused.intersection(self._refusable):
            self._refusable.remove(step)
            self._refuse(step)

    def record_begun(self, transfer: Transfer, tier_write: TierWrite | None = None) -> None:
        """Count a step that was begun, to the stager, into local tiers, or both."""
        self._count_ended()  # here too: the script may never read `stats`
        self._stats.saved += 1
        self._pending.append((transfer, tier_write))

    def record_kept(self, tier: str) -> None:
        """Count a slice that is sealed in a local tier. Any thread."""
        with self._lock:
            self._kept[tier] += 1

    def record_skipped(self, tier: str, cause: str) -> None:
        """Count a step that a local tier does not keep. Any thread."""
        with self._lock:
            self._skipped[f"{tier}: {cause}"] += 1

    def record_refused(self, step: int, reason: Reason) -> None:
        """Note that no local tier keeps a step that was begun, even if slices of it were sealed. Any thread."""
        with self._lock:
            self._refused[step] = reason
            if len(self._refused) > _REFUSABLE_MAX:
                del self._refused[next(iter(self._refused))]

    def record_declined(self, cause: str) -> None:
        """Count a step that was declined before it was begun."""
        self._count_missing(cause, TransferState.DECLINED)

    def add_wait(self, seconds: float) -> None:
        """Add time that `save()` has waited for room."""
        self._stats.wait_seconds += seconds

    def record_comparison(self, seconds: float) -> None:
        """Count a comparison of the whole state with its copy."""
        self._stats.compared += 1
        self._stats.compare_seconds += seconds

    def add_stall(self, cst_seconds: float) -> None:
        """Add the stall time of a step that was begun. Copy thread."""
        self._stats.cst_seconds.append(cst_seconds)

    def summary(self) -> str:
        """Say how many steps were not checkpointed, and why; empty if all were."""
        stats = self.stats
        missing = stats.declined + stats.failed
        if not missing:
            return ""
        causes = ", ".join(f"{count} {cause}" for cause, count in stats.causes.items())
        return f"{missing} of {missing + stats.saved} steps were not checkpointed: {causes}"

    def _refuse(self, step: int) -> None:
        with self._lock:
            reason = self._refused.pop(step)
        self._stats.saved -= 1
        self._count_missing(reason.cause, TransferState.FAILED)

    def _count_missing(self, cause: str, state: TransferState) -> None:
        self._causes[cause] += 1
        # Every rank has begun a torn step, yet DECLINE withdraws it: there is no other message for that.
        if state is TransferState.FAILED or cause == DeclineCause.TORN:
            self._stats.failed += 1
        else:
            self._stats.declined += 1
