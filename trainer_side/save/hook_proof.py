"""Shows in the job, without assuming it, that the hooks of optimizers are called before parameters are changed.

    save() ─► SavedInstant ── a hook is called: nothing that its optimizer updates has changed since ─► it is proven
                            ├ something has changed before a hook was called ────────────────────────► escaped
                            └ another save, and something has changed without any hook ──────────────► escaped

Until all that is copied behind the gate belongs to proven optimizers, `save()` finishes its copy before it returns.
An optimizer may escape its hook because its class never calls `Optimizer.__init__`, because others change its
parameters (averages that are swapped in, a search for sharpness), or because a recorded CUDA graph updates them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch
from torch.optim import Optimizer

from trainer_side.save.gate import storage_address
from trainer_side.save.tearing import SavedInstant, TearCheck
from trainer_side.state.tree import tensor_paths

_log = logging.getLogger("holdfast.trainer.gate")

_CLEAN_AFTER_ESCAPE = 16  # saves; twice as many each time after which another one comes
_CLEAN_MAX = 1024


class HookProof:
    """The knowledge about the hooks so far. All methods belong to the training thread.

    Args:
        optimizers: All that have a hook of the gate, or should have one.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._clean: dict[int, int] = {}  # optimizer → after how many saves its hook came first
        self._recorded: set[int] = set()  # optimizers; for good
        self._clean_needed = 1
        self._holds_for: TearCheck | None = None  # the plan for which all that is needed is proven
        self._pending: SavedInstant | None = None  # nothing was changed since, as far as is known
        self._seen: set[int] = set()  # storages whose changes may come by now
        self._said = False

    def saved(self, instant: SavedInstant | None) -> bool:
        """A save was taken; returns whether its copy may be left behind the gate."""
        if (before := self._pending) is not None:
            # Where a hook was called for everything, nothing is left to be seen.
            unseen = set(before.storages()) - self._seen
            if unseen and (path := before.changed_at(unseen)):
                self.escaped(path, before.step, "no hook of an optimizer was called before that")
        self._pending, self._seen = None, set()
        if instant is None or self._holds_for is instant.check:
            return True
        if self._is_proven(instant):
            self._holds_for = instant.check
            return True
        return False

    def expect(self, instant: SavedInstant) -> None:
        """The copy of this save is done: whether hooks come before changes shows until the next one."""
        self._pending = instant

    def hooked(self, optimizer: Optimizer) -> None:
        """The hook of an optimizer is called: it is about to change what it holds."""
        instant = self._pending
        if instant is None:
            return
        mine = _storages_of(optimizer) - self._seen
        self._seen |= mine
        mine.intersection_update(instant.storages())
        if not mine:
            return
        if path := instant.changed_at(mine):
            self.escaped(path, instant.step, f"the hook of {type(optimizer).__name__} was called only then")
        else:
            self._clean[id(optimizer)] = self._clean.get(id(optimizer), 0) + 1

    def recorded(self, optimizer: Optimizer) -> None:
        """A graph of its step is being recorded: the replays will call no hook."""
        self._recorded.add(id(optimizer))
        self._holds_for = None

    def excused(self) -> None:
        """The copy was waited for: what is changed from here on needs no hook."""
        self._pending = None

    def escaped(self, path: str, step: int, how: str) -> None:
        """A tensor was changed that the gate did not hold back."""
        again = 2 if self._holds_for is not None else 1  # it was shown before, and was not so for ever
        self._clean_needed = min(_CLEAN_MAX, max(_CLEAN_AFTER_ESCAPE, again * self._clean_needed))
        self._pending, self._holds_for = None, None
        self._clean.clear()
        if not self._said:
            self._said = True
            _log.warning(
                "%s was changed after save(%d), and %s: code that changes parameters outside of the step of their "
                "optimizer does not wait for the copy. From now on save() returns only when its copy is done. To be "
                "faster, call "
                "checkpointer.wait_copied() before such changes, or make them in `with checkpointer.changing():`",
                path,
                step,
                how,
            )

    def _is_proven(self, instant: SavedInstant) -> bool:
        open_ones = [
            one
            for one in self._optimizers
            if id(one) in self._recorded or self._clean.get(id(one), 0) < self._clean_needed
        ]
        if not open_ones:
            return True
        needed = set(instant.storages())
        for optimizer in self._optimizers:
            if not any(optimizer is other for other in open_ones):
                needed -= _storages_of(optimizer)
        return not needed


def _storages_of(optimizer: Optimizer) -> set[int]:
    """Addresses of what an optimizer changes: its parameters and its state."""
    return {storage_address(tensor) for tensor in _tensors_of(optimizer)}


def _tensors_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for _, tensor in tensor_paths(list(optimizer.state.values())):
        if tensor.layout is torch.strided:
            yield tensor
