"""The state that every peer saves: a GPT-2 with AdamW, its moments filled by one step of random gradients.

`transformers` builds the model from its configuration; nothing is downloaded. Every rank makes the same
bytes, as the ranks of a data-parallel run hold the same bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

__all__ = ["MODELS", "Workload"]

MODELS: dict[str, dict[str, Any]] = {
    "small": {},  # GPT-2 small as published: 124 M parameters, 1.49 GB with AdamW's two moments
    "tiny": {  # to try the harness
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 64,
        "vocab_size": 512,
        "n_positions": 128,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}
_SEED = 20


class Workload:
    """Model and optimizer of one rank.

    Args:
        model: A key of `MODELS`.
    """

    def __init__(self, model: str) -> None:
        torch.manual_seed(_SEED)
        self.model = GPT2LMHeadModel(GPT2Config(**MODELS[model]))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones counted once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def state(self) -> dict[str, Any]:
        """The objects, as a training script hands them to holdfast."""
        return {"model": self.model, "optimizer": self.optimizer}

    def state_dict(self, *, tied: bool = True) -> dict[str, Any]:
        """The same as a nested state dict; without the second name of the tied embedding if not `tied`."""
        model = dict(self.model.state_dict())
        if not tied:
            del model["lm_head.weight"]
        return {"model": model, "optimizer": self.optimizer.state_dict()}

    def update(self) -> None:
        """An optimizer step that runs all hooks and finds no gradients: the update is the device's work."""
        self.optimizer.step()
