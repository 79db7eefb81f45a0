"""Shows `holdfast drill` what each step was trained on: a CRC-32 of what the modules of the state were called with.

A script that does not use a ResumableSampler says nothing of its data. What reaches the model says it for any script,
also for one that draws its next batch ahead of the checkpoint. Calls in evaluation, or without gradients, do not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from holdfast import supervised as diary
from holdfast.crc import crc32
from trainer_side.state.per_rank import PerRank

_DEPTH_MAX = 8
_CALLS_MAX = 256  # in one step; the last stands for all that follow
_calls: list[int] = []  # since the last step


class SeenBatches:
    """Notes the batches of each step, if this process is in a drill. Training thread.

    Args:
        state: Names mapped to objects, as the checkpoints have them.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        if not diary.is_drilled():
            return
        for value in state.values():
            module = value.value if isinstance(value, PerRank) else value
            if isinstance(module, torch.nn.Module):
                with suppress(Exception):  # of a kind that takes no hooks: then nothing is seen of it
                    module.register_forward_pre_hook(note_call, with_kwargs=True)

    def note(self, step: int) -> None:
        if _calls:
            diary.note("batches", {"step": step, "crcs": _calls})
            _calls.clear()


# A function of this module and no method: modules are copied and pickled together with their hooks.
def note_call(module: torch.nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Count one call of a module."""
    if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
        return
    crc = _calls.pop() if len(_calls) == _CALLS_MAX else 0
    for tensor in _tensors([args, named], 0):
        with suppress(Exception):  # without bytes of its own: sparse, nested, on `meta`
            here = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            crc = crc32(here.numpy().data, crc)
    _calls.append(crc)


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _DEPTH_MAX and isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one, depth + 1)
