"""Decides whether a copy may stay behind the gate: hooks run before parameters change, and nothing else changes them.

    save() ─► SavedInstant ── a hook is called: nothing that its optimizer updates has changed since ─► it is proven
                            ├ something has changed before a hook was called ────────────────────────► it escaped
                            └ another save, and something has changed without any hook ──────────────► it escaped

    save() ─► its copy is finished inside ─► first update, or next save: every byte as in the copy? ─► quiet
                                                                                └ no ─► distrusted, for good
    quiet ─► copies stay behind the gate: 7 8 9 … ─► a save that the step draws, about one in 50: as at first

Optimizer hooks, counters and sampled words (tearing.py) miss a few elements written through `.data` or numpy. A rank
that finds some tells all ranks: each of them copies inside `save()` from then on, and the steps copied behind the gate
since its last comparison are doubtful. A slice that is quickly copied never stays behind the gate.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch.optim import Optimizer

from holdfast.image.replicas import first_row
from holdfast.telemetry.events import EventLog
from holdfast.wire.doubt import Doubt
from trainer_side.ledger import Ledger
from trainer_side.save.gate import storage_address
from trainer_side.save.tearing import SavedInstant, TearCheck
from trainer_side.state.optimizer_places import parameters_of
from trainer_side.state.tree import tensor_paths

if TYPE_CHECKING:
    from trainer_side.save.staging import Staging

_log = logging.getLogger("holdfast.trainer.gate")

_CLEAN_AFTER_ESCAPE = 16  # saves; doubled whenever a proof has failed
_CLEAN_MAX = 1024


class HookCoverage:
    """Finds out which optimizers call their hook before they change parameters. Training thread.

    Until all gated tensors belong to such optimizers, `save()` finishes its copy before it returns. An optimizer may
    escape its hook because its class never calls `Optimizer.__init__`, because other code changes its parameters
    (swapped-in averages, sharpness-aware minimization), or because a recorded CUDA graph updates them.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        # Optimizer → after how many saves its hook came before any change.
        self._clean_counts: dict[int, int] = {}
        self._graph_captured: set[int] = set()  # optimizers whose step is part of a graph
        self._clean_needed = 1
        self._proven_for: TearCheck | None = None  # the plan for which coverage is proven
        self._pending: SavedInstant | None = None  # no change is known since
        self._announced: set[int] = set()  # storages whose changes a hook has announced
        self._warned = False

    def record_save(self, instant: SavedInstant | None) -> bool:
        """Note a save; return whether its copy may stay behind the gate."""
        if (before := self._pending) is not None:
            # If hooks have announced everything, nothing is left to check.
            unseen = set(before.storages()) - self._announced
            if unseen and (path := before.find_changed_at(unseen)):
                self.record_escape(path, before.step, "no hook of an optimizer was called before that")
        self._pending, self._announced = None, set()
        if instant is None or self._proven_for is instant.check:
            return True
        if self._is_proven(instant):
            self._proven_for = instant.check
            return True
        return False

    def watch(self, instant: SavedInstant) -> None:
        """Watch until the next save whether hooks precede changes. The copy of this save is done."""
        self._pending = instant

    def record_hook(self, optimizer: Optimizer) -> None:
        """Note that an optimizer is about to change its parameters and state."""
        instant = self._pending
        if instant is None:
            return
        mine = _storages_of(optimizer) - self._announced
        self._announced |= mine
        mine.intersection_update(instant.storages())
        if not mine:
            return
        if path := instant.find_changed_at(mine):
            self.record_escape(
                path, instant.step, f"the hook of {type(optimizer).__name__} was called only then"
            )
        else:
            self._clean_counts[id(optimizer)] = self._clean_counts.get(id(optimizer), 0) + 1

    def record_graph_capture(self, optimizer: Optimizer) -> None:
        """Note that a graph of its step is being recorded: the replays will call no hook."""
        self._graph_captured.add(id(optimizer))
        self._proven_for = None

    def stop_watching(self) -> None:
        """Stop watching: the script has waited for the copy, so changes need no hook."""
        self._pending = None

    def record_escape(self, path: str, step: int, how: str) -> None:
        """Note a change that the gate did not hold back."""
        again = 2 if self._proven_for is not None else 1  # an earlier proof has failed
        self._clean_needed = min(_CLEAN_MAX, max(_CLEAN_AFTER_ESCAPE, again * self._clean_needed))
        self._pending, self._proven_for = None, None
        self._clean_counts.clear()
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s was changed after save(%d), and %s: code that changes parameters outside of the step of their "
                "optimizer does not wait for the copy. From now on save() returns only when its copy is done. To be "
                "faster, call checkpointer.wait_copied() before such changes, or make them in "
                "`with checkpointer.changing():`",
                path,
                step,
                how,
            )

    def _is_proven(self, instant: SavedInstant) -> bool:
        clean = {one for one, times in self._clean_counts.items() if times >= self._clean_needed}
        proven = [one for one in self._optimizers if id(one) in clean - self._graph_captured]
        if len(proven) == len(self._optimizers):
            return True
        return not set(instant.storages()).difference(*map(_storages_of, proven))


def _storages_of(optimizer: Optimizer) -> set[int]:
    state = [tensor for _, tensor in tensor_paths(list(optimizer.state.values()))]
    strided = [tensor for tensor in state if tensor.layout is torch.strided]
    return {storage_address(tensor) for tensor in (*parameters_of(optimizer), *strided)}


_COMPARED_EVERY = 50  # saves, on average
_RATES_KEPT = 8


class CopyPolicy:
    """Decides whether a copy may outlast `save()`: watches for changes of live tensors that no hook announces. Training
    thread, unless a method says otherwise. `send_doubt` sends a doubt to all ranks; called in any thread.
    """

    def __init__(
        self,
        rank: int,
        *,
        mode: Literal["auto", "inside"],
        inside_ms_max: float,
        send_doubt: Callable[[Doubt], None],
        ledger: Ledger,
        events: EventLog,
    ) -> None:
        self._rank, self._mode, self._inside_seconds_max = rank, mode, inside_ms_max / 1000
        self._send_doubt, self._ledger, self._events = send_doubt, ledger, events
        self._guard = threading.Lock()
        self._distrusted = False
        # First and last step copied behind the gate since the last good comparison.
        self._unverified_steps: tuple[int, int] | None = None
        self._rates: deque[float] = deque(maxlen=_RATES_KEPT)  # seconds for each byte of the slice
        # To compare with the live tensors before anything may change them: a save, its copy, and whether that is whole.
        self._pending_comparison: tuple[SavedInstant, Staging, Callable[[], bool]] | None = None

    @staticmethod
    def is_sampled(step: int) -> bool:
        """Whether the save of this step is compared; drawn, so that no periodic change can hide."""
        return first_row(step, _COMPARED_EVERY) == 0

    def record_copy(self, nbytes: int, seconds: float) -> None:
        """Note how long a slice took to copy. Copy thread, before it opens the gate."""
        with self._guard:
            self._rates.append(seconds / max(1, nbytes))

    def must_copy_inside(self, nbytes: int, *, on_device: bool) -> bool:
        """Whether `save()` waits for a copy of `nbytes`, regardless of the hooks. `on_device`: Some live tensors are on
        a device, whose copy runs after all work queued there, so `save()` would wait long however quick the copy is.
        """
        with self._guard:
            if self._mode == "inside" or self._distrusted:
                return True
            if on_device:
                return False
            return bool(self._rates) and statistics.median(self._rates) * nbytes <= self._inside_seconds_max

    def allow_behind_gate(self, step: int) -> bool:
        """Leave the copy of this step behind the gate; return False if trust was lost meanwhile."""
        with self._guard:
            if not self._distrusted:
                first = step if self._unverified_steps is None else self._unverified_steps[0]
                self._unverified_steps = first, step
            return not self._distrusted

    def schedule_comparison(
        self, instant: SavedInstant, area: Staging, is_complete: Callable[[], bool]
    ) -> None:
        """Schedule a comparison of this instant with its copy, provided that the copy is whole."""
        self._pending_comparison = instant, area, is_complete

    @property
    def has_pending_comparison(self) -> bool:
        return self._pending_comparison is not None

    def cancel_comparison(self) -> None:
        """Cancel the comparison: the script has waited for the copy, so it may change the state by any means."""
        self._pending_comparison = None

    def compare(self) -> bool:
        """Run the scheduled comparison; return whether all bytes are equal, except for changes that torch has counted.

        No copy is in flight. The area still holds the copy: only a later save reuses it.
        """
        awaited, self._pending_comparison = self._pending_comparison, None
        if awaited is None:
            return False
        instant, area, is_complete = awaited
        if not is_complete():
            return False
        begun = time.monotonic()
        path, step = instant.find_uncounted_change(area.memory), instant.step
        seconds = time.monotonic() - begun
        self._ledger.record_comparison(seconds)
        self._events.emit("compared", {"seconds": seconds, "nbytes": area.nbytes, "changed": path}, step=step)
        if not path:
            with self._guard:
                self._unverified_steps = None
            return True
        self.distrust(
            f"{path} was changed after save({step}), in a way that torch does not count, and not in a step of its "
            "optimizer"
        )
        return False

    def distrust(self, reason: str) -> None:
        """Tell all ranks that this one has found a change that the gate does not hold back. Any thread."""
        doubt = self._lose_trust(reason)
        if doubt is None:
            return
        _log.warning(
            "rank %d: %s. From now on save() returns only when its copy is done, on all ranks%s. To be faster next "
            "time, call checkpointer.wait_copied() before such changes, or make them in "
            "`with checkpointer.changing():`",
            self._rank,
            reason,
            f"; {doubt.sentence()}" if doubt.steps else "",
        )
        self._send_doubt(doubt)

    def handle_doubt(self, doubt: Doubt) -> None:
        """Take in the doubt of another rank. Link's or council's thread."""
        mine = self._lose_trust(doubt.reason)
        if mine is None:
            return
        _log.warning(
            "rank %d: save() returns only when its copy is done from now on, as rank %d has seen that %s",
            self._rank,
            doubt.rank,
            doubt.reason,
        )
        if mine.steps:
            self._send_doubt(mine)

    def _lose_trust(self, reason: str) -> Doubt | None:
        """Stop trusting the hooks. Returns the doubt to send to all ranks; None if trust was lost before."""
        with self._guard:
            if self._distrusted:
                return None
            self._distrusted = True
            behind, self._unverified_steps = self._unverified_steps, None
        self._events.emit("distrusted", {"reason": reason, "steps": list(behind or ())})
        return Doubt(self._rank, behind, reason)
