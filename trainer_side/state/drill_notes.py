"""Notes for `holdfast drill`, which compares them step by step: the batches of training, and plain counters on modules.

A script that does not use a ResumableSampler does not report its data. The inputs of the model identify a batch for any
script, even if it draws its next batch before the checkpoint. Calls in evaluation, or without gradients, do not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import torch

from holdfast import supervised as diary
from trainer_side.state.tree import unwrap_per_rank
from trainer_side.state.value_crc import leaves_in, tensor_crc

_NUMBERS_MAX = 10_000


class CounterNotes:
    """Records the changed numbers on modules at each step, on rank 0 of a drill. Training thread."""

    def __init__(self, state: Mapping[str, Any], *, rank: int) -> None:
        self._state, self._wanted = state, rank == 0 and diary.is_in_drill()
        self._before: dict[str, float] | None = None

    def note(self, step: int) -> None:
        if not self._wanted:
            return
        now, before = dict(islice(_numbers(self._state), _NUMBERS_MAX)), self._before or {}
        changed = {path: number for path, number in now.items() if before.get(path) != number}
        # The first note of a process has all numbers.
        diary.write_diary("counters", {"step": step, "begins": self._before is None, "values": changed})
        self._before = now


def _numbers(state: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    modules = ((name, value) for name, value in state.items() if isinstance(value, torch.nn.Module))
    for name, whole in modules:
        for prefix, module in whole.named_modules():
            where = f"{name}/{prefix}." if prefix else f"{name}/"
            for key, number in vars(module).items():
                if type(number) in (int, float) and not key.startswith("_"):
                    yield where + key, number


_CALLS_MAX = 256  # in one step; the last CRC covers all further calls
_calls: list[int] = []  # since the last step


class BatchNotes:
    """Records the batches of each step, if this process is in a drill. Training thread."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        if not diary.is_in_drill():
            return
        for module in unwrap_per_rank(state).values():
            if isinstance(module, torch.nn.Module):
                with suppress(Exception):  # a module that takes no hooks is left out
                    module.register_forward_pre_hook(note_call, with_kwargs=True)

    def note(self, step: int) -> None:
        if _calls:
            diary.write_diary("batches", {"step": step, "crcs": _calls})
            _calls.clear()


# A function and not a method: modules are copied and pickled together with their hooks.
def note_call(module: torch.nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
        return
    crc = _calls.pop() if len(_calls) == _CALLS_MAX else 0
    for leaf in leaves_in([args, named]):
        if isinstance(leaf, torch.Tensor):
            crc = tensor_crc(leaf, crc)
    _calls.append(crc)
