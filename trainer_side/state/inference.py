"""Tensors that were made in `torch.inference_mode()`: torch lets them be changed only in that mode."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.parameter import is_lazy


def writable(value: object) -> AbstractContextManager[object]:
    """Context in which `value`, a tensor or a module, can be filled in place, also if it was made in inference mode.

    The tensors of other objects are left to their own `load_state_dict`.
    """
    if isinstance(value, torch.nn.Module):
        tensors = [one for one in (*value.parameters(), *value.buffers()) if not is_lazy(one)]
        made_in_mode = any(tensor.is_inference() for tensor in tensors)
        return torch.inference_mode() if made_in_mode else nullcontext()
    if isinstance(value, torch.Tensor):
        return torch.inference_mode() if value.is_inference() else torch.no_grad()
    return nullcontext()
