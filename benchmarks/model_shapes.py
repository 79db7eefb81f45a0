"""Shapes of ten models' parameters and buffers, from their papers' tables: the contents of their checkpoints.

Nothing computes with these models, so shapes suffice. `parameters_of` gives the published counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Literal

__all__ = ["SHAPED_MODELS", "Shaped", "is_transformer", "parameters_of", "shapes_of"]

_CLASSES = 1000
Shaped = tuple[Literal["parameter", "buffer"], tuple[int, ...]]  # buffers: running statistics of batch norms


def shapes_of(model: str) -> list[Shaped]:
    """Return the shapes in the order of the model's state dict. `model`: one of `SHAPED_MODELS`."""
    return list(SHAPED_MODELS[model]())


def parameters_of(model: str) -> int:
    """Return the number of trained parameters."""
    return sum(math.prod(shape) for kind, shape in shapes_of(model) if kind == "parameter")


def is_transformer(model: str) -> bool:
    """Whether the model is trained with AdamW, which has two moments; the others use SGD with one."""
    return model.startswith(("bert", "gpt"))


def _linear(inputs: int, outputs: int) -> Iterator[Shaped]:
    yield "parameter", (outputs, inputs)
    yield "parameter", (outputs,)


def _norm(width: int) -> Iterator[Shaped]:
    """A layer norm, or the trained part of a batch norm."""
    yield "parameter", (width,)
    yield "parameter", (width,)


def _batch_norm(width: int) -> Iterator[Shaped]:
    yield from _norm(width)
    yield "buffer", (width,)
    yield "buffer", (width,)


def _conv(inputs: int, outputs: int, side: int) -> Iterator[Shaped]:
    """A convolution without bias, and its batch norm."""
    yield "parameter", (outputs, inputs, side, side)
    yield from _batch_norm(outputs)


def _resnet(depths: tuple[int, ...], *, bottleneck: bool) -> Iterator[Shaped]:
    """He et al., CVPR 2016, table 1."""
    yield from _conv(3, 64, 7)
    inputs, grows = 64, 4 if bottleneck else 1
    for stage, depth in enumerate(depths):
        width = 64 << stage
        for block in range(depth):
            if bottleneck:
                yield from _conv(inputs, width, 1)
                yield from _conv(width, width, 3)
                yield from _conv(width, grows * width, 1)
            else:
                yield from _conv(inputs, width, 3)
                yield from _conv(width, width, 3)
            if block == 0 and inputs != grows * width:
                yield from _conv(inputs, grows * width, 1)
            inputs = grows * width
    yield from _linear(inputs, _CLASSES)


def _vgg16() -> Iterator[Shaped]:
    """Simonyan and Zisserman, ICLR 2015, table 1, column D: convolutions with bias, without batch norms."""
    widths = (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
    for inputs, outputs in pairwise(widths):
        yield "parameter", (outputs, inputs, 3, 3)
        yield "parameter", (outputs,)
    for inputs, outputs in pairwise((512 * 7 * 7, 4096, 4096, _CLASSES)):
        yield from _linear(inputs, outputs)


def _densenet(depths: tuple[int, ...], growth: int = 32) -> Iterator[Shaped]:
    """Huang et al., CVPR 2017, table 1."""
    width = 2 * growth
    yield from _conv(3, width, 7)
    for stage, depth in enumerate(depths):
        for _ in range(depth):
            yield from _batch_norm(width)
            yield from _conv(width, 4 * growth, 1)
            yield "parameter", (growth, 4 * growth, 3, 3)
            width += growth
        yield from _batch_norm(width)  # the transition's, or the final one
        if stage + 1 < len(depths):
            yield "parameter", (width // 2, width, 1, 1)
            width //= 2
    yield from _linear(width, _CLASSES)


# Each stage's expansion, kernel side, width, depth.
_STAGES = (
    (1, 3, 16, 1),
    (6, 3, 24, 2),
    (6, 5, 40, 2),
    (6, 3, 80, 3),
    (6, 5, 112, 3),
    (6, 5, 192, 4),
    (6, 3, 320, 1),
)


def _efficientnet(wider: float, deeper: float) -> Iterator[Shaped]:
    """Tan and Le, ICML 2019, table 1; squeeze and excitation in each block."""
    inputs = _of_eight(32 * wider)
    yield from _conv(3, inputs, 3)
    for expansion, side, width, depth in _STAGES:
        outputs = _of_eight(width * wider)
        for _ in range(math.ceil(depth * deeper)):
            inner = inputs * expansion
            if expansion > 1:
                yield from _conv(inputs, inner, 1)
            yield from _conv(1, inner, side)  # depthwise
            squeezed = inputs // 4
            yield from (("parameter", (squeezed, inner, 1, 1)), ("parameter", (squeezed,)))
            yield from (("parameter", (inner, squeezed, 1, 1)), ("parameter", (inner,)))
            yield from _conv(inner, outputs, 1)
            inputs = outputs
    yield from _conv(inputs, 4 * inputs, 1)
    yield from _linear(4 * inputs, _CLASSES)


def _of_eight(width: float) -> int:
    """Round to a multiple of eight, at least nine tenths of `width`."""
    rounded = max(8, int(width + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * width else rounded + 8


def _bert(width: int, depth: int) -> Iterator[Shaped]:
    """Devlin et al., NAACL 2019, uncased, with its pooler."""
    for rows in (30522, 512, 2):
        yield "parameter", (rows, width)
    yield from _norm(width)
    for _ in range(depth):
        for _ in range(4):
            yield from _linear(width, width)
        yield from _norm(width)
        yield from _linear(width, 4 * width)
        yield from _linear(4 * width, width)
        yield from _norm(width)
    yield from _linear(width, width)


def _gpt2(width: int = 768, depth: int = 12) -> Iterator[Shaped]:
    """Radford et al., 2019, by default the small model; the output layer shares the embedding."""
    for rows in (50257, 1024):
        yield "parameter", (rows, width)
    for _ in range(depth):
        yield from _norm(width)
        yield from _linear(width, 3 * width)
        yield from _linear(width, width)
        yield from _norm(width)
        yield from _linear(width, 4 * width)
        yield from _linear(4 * width, width)
    yield from _norm(width)


# From the smallest state to the largest.
SHAPED_MODELS: Mapping[str, Callable[[], Iterator[Shaped]]] = {
    "efficientnet-b0": lambda: _efficientnet(1.0, 1.0),
    "densenet121": lambda: _densenet((6, 12, 24, 16)),
    "resnet18": lambda: _resnet((2, 2, 2, 2), bottleneck=False),
    "resnet50": lambda: _resnet((3, 4, 6, 3), bottleneck=True),
    "resnet152": lambda: _resnet((3, 8, 36, 3), bottleneck=True),
    "efficientnet-b7": lambda: _efficientnet(2.0, 3.1),
    "vgg16": _vgg16,
    "bert-base": lambda: _bert(768, 12),
    "gpt2": _gpt2,
    "bert-large": lambda: _bert(1024, 24),
}
