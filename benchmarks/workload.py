"""The states that every peer saves: models built from public configurations, with moments filled by one update.

`transformers` builds the models; nothing is downloaded. Every rank makes the same bytes, as in a data-parallel run.

    gpt2         GPT-2 small with AdamW            124 M parameters, 1.49 GB
    bert-large   BERT large with AdamW             335 M parameters, 4.0 GB
    resnet50     ResNet-50 with SGD and momentum    26 M parameters, 0.20 GB
    resnet152    ResNet-152 with SGD and momentum   60 M parameters, 0.48 GB
    tiny         a toy GPT-2, to try the harness
    shapes-NAME  one of ten models as shapes alone: benchmarks/model_shapes.py
    flat-N-M     N parameters of together M MiB with AdamW, to measure the cost of their number alone
    fsdp2-N      N MB split among the ranks, and hsdp-N: benchmarks/sharded_workload.py
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from benchmarks.model_shapes import is_transformer, shapes_of

__all__ = ["ADAM_COPIES", "FLOAT_BYTES", "MODELS", "SEED", "Workload", "is_bare", "is_sharded", "is_toy"]

MODELS = ("gpt2", "bert-large", "resnet50", "resnet152", "tiny")
_TINY: dict[str, Any] = {
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 64,
    "vocab_size": 512,
    "n_positions": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_SHAPES = "shapes-"
SEED = 20
_TOY_MEBIBYTES = 64
_TOKENS = 16
_PIXELS = 64
FLOAT_BYTES = 4
ADAM_COPIES = 3  # a parameter and its two moments


def is_toy(model: str) -> bool:
    """Whether the model is too small for the default chunk and ring."""
    sized = model.startswith("flat-") or is_sharded(model)
    return model == "tiny" or (sized and int(model.rsplit("-", maxsplit=1)[-1]) < _TOY_MEBIBYTES)


def is_sharded(model: str) -> bool:
    """Whether the model is split among the ranks."""
    return model.startswith(("fsdp2-", "hsdp-"))


def _flat(model: str) -> nn.Module:
    _, tensors, mebibytes = model.split("-")
    numel = max(1, int(mebibytes) * (1 << 20) // (FLOAT_BYTES * ADAM_COPIES * int(tensors)))
    return nn.ParameterList([nn.Parameter(torch.randn(numel)) for _ in range(int(tensors))])


def is_bare(model: str) -> bool:
    """Whether the model is only tensors, without a forward pass."""
    return model.startswith(("flat-", _SHAPES))


def _of_shapes(model: str) -> nn.Module:
    net = nn.Module()
    for number, (kind, shape) in enumerate(shapes_of(model)):
        if kind == "parameter":
            net.register_parameter(f"tensor{number}", nn.Parameter(torch.randn(shape)))
        else:
            net.register_buffer(f"tensor{number}", torch.randn(shape))
    return net


def _build(model: str) -> nn.Module:
    if model.startswith(_SHAPES):
        return _of_shapes(model.removeprefix(_SHAPES))
    if model.startswith("flat-"):
        return _flat(model)
    # The import takes seconds, and not every model needs it. mypy leaves the models out (pyproject.toml).
    transformers: Any = importlib.import_module("transformers")
    net: nn.Module
    if model.startswith("resnet"):
        depths = {"resnet50": [3, 4, 6, 3], "resnet152": [3, 8, 36, 3]}[model]
        labels: dict[str, Any] = {"num_labels": 1000}
        net = transformers.ResNetForImageClassification(transformers.ResNetConfig(depths=depths, **labels))
    elif model == "bert-large":
        config = transformers.BertConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
        )
        net = transformers.BertForMaskedLM(config)
    else:
        net = transformers.GPT2LMHeadModel(transformers.GPT2Config(**(_TINY if model == "tiny" else {})))
    return net


class Workload:
    """Model and optimizer of one rank.

    Args:
        model: One of `MODELS`, `shapes-NAME`, or `flat-N-M`.
    """

    def __init__(self, model: str) -> None:
        torch.manual_seed(SEED)
        self._name = model
        self.keeps_gradients = False
        self.model = _build(model)
        if model.startswith("resnet") or (
            model.startswith(_SHAPES) and not is_transformer(model.removeprefix(_SHAPES))
        ):
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
                self.model.parameters(), lr=1e-3, momentum=0.9
            )
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.make_gradients()
        self.update()

    @property
    def is_sharded(self) -> bool:
        """Whether the state is split among the ranks."""
        return is_sharded(self._name)

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones counted once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def tensors(self) -> int:
        """Number of tensors in the state dict."""
        moments = sum(
            isinstance(value, torch.Tensor) for of in self.optimizer.state.values() for value in of.values()
        )
        return len(self.model.state_dict()) + moments

    def state(self) -> dict[str, Any]:
        """Return the objects that a training script passes to holdfast."""
        return {"model": self.model, "optimizer": self.optimizer}

    def state_dict(self, *, tied: bool = True) -> dict[str, Any]:
        """Return the state as a nested state dict; without the second name of a tied embedding if not `tied`."""
        model = dict(self.model.state_dict())
        if not tied:
            seen: set[int] = set()
            for name, value in list(model.items()):
                if value.numel() and value.data_ptr() in seen:
                    del model[name]
                seen.add(value.data_ptr())
        return {"model": model, "optimizer": self.optimizer.state_dict()}

    def make_gradients(self) -> None:
        """Give every parameter a random gradient."""
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)

    def compute(self) -> None:
        """Run forward and backward on the CPU, on one small batch that is the same on all ranks."""
        if self._name.startswith("resnet"):
            picture = torch.ones(1, 3, _PIXELS, _PIXELS)
            loss = self.model(pixel_values=picture, labels=torch.tensor([1])).loss
        elif is_bare(self._name):
            loss = sum((parameter.sum() for parameter in self.model.parameters()), torch.zeros(()))
        else:
            tokens = torch.arange(_TOKENS).reshape(1, -1)
            loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()

    def update(self) -> None:
        """Run an optimizer step. Without gradients it runs all hooks and changes nothing, as if a device updated."""
        self.optimizer.step()
        if not self.keeps_gradients:
            self.optimizer.zero_grad(set_to_none=True)
