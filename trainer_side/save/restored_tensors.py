"""Remembers the tensors that `restore()` has filled, to see whether they are those that are trained and saved."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from trainer_side.state.split_tensor import local_of

_SAMPLE_BYTES = 64  # at the begin and at the end of a tensor


class _Filled(NamedTuple):
    tensor: weakref.ref[torch.Tensor]
    sample: bytes


class RestoredTensors:
    """The parameters of the state's modules as `restore()` left them. Training thread.

    Args:
        state: Names mapped to objects, as the checkpoints have them.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._filled: dict[str, _Filled] = {}

    def remember(self) -> None:
        """`restore()` has just come to its end."""
        self._filled = {
            path: _Filled(weakref.ref(tensor), _sample(tensor)) for path, tensor in _parameters(self._state)
        }

    def strays(self) -> list[str]:
        """One sentence for each parameter that was filled, and that the state does not have any more.

        To be called before the first step after `remember`: a parameter that was made again from the restored one is
        known by its bytes. Those on a device are not read, and neither are parameters that became DTensors.
        """
        now = dict(_parameters(self._state))
        path_of = {id(tensor): path for path, tensor in reversed([*now.items()])}
        said = []
        for path, filled in self._filled.items():
            tensor, current = filled.tensor(), now.get(path)
            if current is not None and current is tensor:
                continue
            if tensor is not None and id(tensor) in path_of:
                continue  # it has another name now: a wrapper, a parametrization
            if current is None:
                said.append(f"{path} is no longer part of the state")
            elif local_of(current) is not current or (filled.sample and _sample(current) == filled.sample):
                continue
            elif path_of[id(current)] != path or self._was_filled(current):
                said.append(f"{path} is now the same tensor as {self._first_path(current, path_of)}")
            else:
                said.append(f"{path} is another tensor now, with the script's own values")
        self._filled.clear()
        return said

    def _was_filled(self, tensor: torch.Tensor) -> bool:
        return any(filled.tensor() is tensor for filled in self._filled.values())

    def _first_path(self, tensor: torch.Tensor, path_of: Mapping[int, str]) -> str:
        filled = (path for path, one in self._filled.items() if one.tensor() is tensor)
        return next(filled, path_of[id(tensor)])


def _parameters(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in state.items():
        if isinstance(value, torch.nn.Module):
            for path, parameter in value.named_parameters(remove_duplicate=False):
                yield f"{name}/{path}", parameter


def _sample(tensor: torch.Tensor) -> bytes:
    """Some bytes of a tensor in host memory; none of others, which would have to be waited for."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or local_of(tensor) is not tensor:
        return b""
    if not tensor.is_contiguous() or not tensor.numel() or tensor.is_quantized:
        return b""
    count = -(-_SAMPLE_BYTES // tensor.itemsize)
    flat = tensor.detach().view(-1)
    ends = torch.cat([flat[:count], flat[-count:]])
    return f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + ends.view(torch.uint8).numpy().tobytes()
