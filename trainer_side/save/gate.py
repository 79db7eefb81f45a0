"""The gate: keeps an optimizer from overwriting tensors that are still being copied. It waits for nothing else.

    save(step) ── close ──► copy thread: hold(storages), release(storage) … release(storage) ──► open
    forward, backward continue …   optimizer.step(): update the layers that are copied, wait for the next ones

A hook on each optimizer does the waiting; the training loop is not changed. Optimizers that update each parameter
independently step layer by layer behind the copy (split_step.py; LightCheck, ICCD 2023, section III-B). Others wait for
the whole copy (two-phase checkpointing as in CheckFreq, FAST 2021), after one warning.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from trainer_side.opaque import is_fake_mode, opaque_hook
from trainer_side.save.split_step import (
    COMPILED,
    StepArguments,
    collective_step_reason,
    run_closure,
    split_step,
    unsplittable_reason,
)
from trainer_side.state.split_tensor import local_of

_log = logging.getLogger("holdfast.trainer.gate")

# A waiting update resumes when one in this many of its held storages is free. Checking all of them after each copied
# one would cost more than the update itself, and hold the GIL that the copy thread needs.
_PIECES = 8


class Gate:
    """Holds back updates of tensors that are being copied.

    The training thread makes and closes the gate; the copy thread passes storages and opens it. A storage is known by
    its address (`storage_address`): tensors that share one are held together. `optimizers`: All whose parameters and
    state are copied behind the gate, and those that they wrap; hook_coverage.py finds out whether their hooks are
    called. `seconds_max`: Most seconds that an update is held back; then `on_late` is called and the update proceeds:
    the copy must not be used any more. `on_hook`: Called with the optimizer at the start of each hook.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        seconds_max: float = 300.0,
        on_late: Callable[[], None] = lambda: None,
        on_hook: Callable[[Optimizer], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._seconds_max, self._on_late, self._on_hook = clock, seconds_max, on_late, on_hook
        self._changed = threading.Condition()
        self.closed = False  # a copy is in flight
        self._held: set[int] | None = set()  # None: everything
        self._waiting: dict[int, float] = {}  # thread → since when
        self._waited_seconds = 0.0
        self._update_order: list[Optimizer] = list(optimizers)
        self.order_changed = True  # the order may have changed since the last `update_order()`
        self._unsplittable = {id(one): reason for one in optimizers if (reason := unsplittable_reason(one))}
        self._warned: set[str] = set()
        hook = opaque_hook(self._hook)
        self._hooks = [
            (optimizer, optimizer.register_step_pre_hook(hook))
            for optimizer in optimizers
            if hasattr(optimizer, "_optimizer_step_pre_hooks")  # its class may not call Optimizer.__init__
        ]

    def close(self) -> None:
        """Close the gate for every parameter. Training thread only."""
        for optimizer, hook in self._hooks:
            # The last hook: a later one, such as gradient clipping, would find some parameters updated already.
            optimizer._optimizer_step_pre_hooks.move_to_end(hook.id)  # type: ignore[attr-defined]
        with self._changed:
            self._waited_seconds = 0.0
            self._held = None
            self.closed = True

    def leave_open(self) -> None:
        """Begin a save that holds back nothing. Training thread only."""
        with self._changed:
            self._waited_seconds = 0.0

    def hold(self, storages: Collection[int]) -> None:
        """Hold only these storages; all others may be updated at once. Copy thread."""
        with self._changed:
            if self.closed:
                self._held = set(storages)
                self._changed.notify_all()

    def release(self, storages: Collection[int]) -> None:
        """Release storages that were read completely, many at a time. Copy thread."""
        with self._changed:
            if self._held is not None:
                self._held.difference_update(storages)
            if self._waiting:
                self._changed.notify_all()

    def open(self) -> float:
        """Let all updates pass; return for how many seconds updates were held back. Any thread."""
        with self._changed:
            now = self._clock() if self._waiting else 0.0
            waited = self._waited_seconds + sum(now - since for since in self._waiting.values())
            self.closed = False
            self._held = set()
            self._changed.notify_all()
        return waited

    def wait(self) -> None:
        """Wait until no copy is in flight."""
        if self.closed:
            self._wait(lambda: not self.closed)

    def update_order(self) -> dict[int, int]:
        """Return each storage's place in the order of the last updates, by address. The gate is closed."""
        self.order_changed = False
        order: dict[int, int] = {}
        for optimizer in self._update_order:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    for storage in _storages(optimizer, parameter):
                        order.setdefault(storage, len(order))
        return order

    def remove(self) -> None:
        for _, hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _hook(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], *, compiled: bool
    ) -> StepArguments | None:
        if is_fake_mode():
            return None  # the step is traced: it changes nothing yet
        self._on_hook(optimizer)
        if self._update_order[-1] is not optimizer:
            # An optimizer per layer steps in backward, the last layer first: calls come in the order of updates.
            self._update_order.remove(optimizer)
            self._update_order.append(optimizer)
            self.order_changed = True
        if not self.closed:
            return None
        if reason := self._unsplittable.get(id(optimizer), COMPILED if compiled else ""):
            # Warned of only here, since a hook that is never called holds nothing back.
            self._warn_once(reason)
            self.wait()
            return None
        arguments, computed = run_closure((args, kwargs))
        if self._held is not None and not self._held:
            return arguments if computed else None  # nothing is held
        if reason := collective_step_reason(optimizer):
            self._warn_once(reason)
            self.wait()
            return arguments if computed else None
        places: dict[int, tuple[int, ...]] = {}  # a cache: they do not change within a step

        def held(parameter: torch.Tensor) -> bool:
            storages = places.get(id(parameter))
            if storages is None:
                storages = places[id(parameter)] = tuple(_storages(optimizer, parameter))
            now = self._held
            return now is None or not now.isdisjoint(storages)

        def wait_for_more() -> None:
            if (now := self._held) is None:
                self._wait(lambda: self._held is not None)
                return
            waited_for = {storage for storages in places.values() for storage in storages} & now
            if waited_for:  # empty if they were released meanwhile
                enough = max(1, len(waited_for) // _PIECES)
                self._wait(lambda: self._held is not None and len(waited_for - self._held) >= enough)

        rest = split_step(optimizer, arguments, held=held, wait_for_more=wait_for_more)
        return arguments if rest is None and computed else rest

    def _warn_once(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            _log.warning("%s", reason)

    def _wait(self, until: Callable[[], bool]) -> None:
        thread = threading.get_ident()
        with self._changed:
            if until():
                return
            self._waiting[thread] = self._clock()
            in_time = False
            try:
                in_time = self._changed.wait_for(until, self._seconds_max)
            finally:
                self._waited_seconds += self._clock() - self._waiting.pop(thread)
        if not in_time:
            self._on_late()
            self.open()


def storage_address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage, by which the gate knows it; for a DTensor, of its local tensor's."""
    return local_of(tensor).untyped_storage().data_ptr()


def _storages(optimizer: Optimizer, parameter: torch.Tensor) -> Iterator[int]:
    """Yield the addresses of the storages that a step of this parameter changes: its own and its state's."""
    yield storage_address(parameter)
    for value in optimizer.state.get(parameter, {}).values():
        if isinstance(value, torch.Tensor):
            yield storage_address(value)
