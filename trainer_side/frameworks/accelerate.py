"""Hugging Face's Accelerate: what an `Accelerator` has prepared, as the state of a `Checkpointer`.

    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.register_for_checkpointing(average)
    with Checkpointer({**prepared(accelerator), "data": sampler}, every=100) as checkpointer:

What `accelerator.prepare` gives back are wrappers: holdfast takes what is in them, whose optimizers it can hold back.
The names are those of what is prepared, in its order. docs/frameworks.md says more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holdfast.errors import ConfigError
from trainer_side.frameworks.missing import missing
from trainer_side.state.per_rank import PerRank
from trainer_side.state.rng import RngState

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
except ImportError as error:
    raise missing("accelerate", error) from error

__all__ = ["prepared"]

_WHOLE = {
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
}


def prepared(accelerator: Accelerator) -> dict[str, Any]:
    """Models, optimizers, schedulers, the scaler of gradients, registered objects, and each rank's random numbers.

    One of a kind is `model`, `optimizer`, `scheduler`, `registered`; several are `model0`, `model1` and so on. Loaders
    are not among them: put a `ResumableSampler` beside them, and do not prepare the loader that reads it, since
    Accelerate would share out its batches a second time.

    Args:
        accelerator: After `prepare` and `register_for_checkpointing`.

    Raises:
        ConfigError: It shards models among the ranks; or nothing was prepared.
    """
    if accelerator.distributed_type not in _WHOLE:
        raise ConfigError(
            "accelerate: holdfast saves models that every rank has whole, this Accelerator is "
            f"{accelerator.distributed_type}; use plain data parallelism"
        )
    if not accelerator._models:
        raise ConfigError(
            "accelerate: this Accelerator has prepared no model; call prepared() after accelerator.prepare()"
        )
    optimizers = [optimizer.optimizer for optimizer in accelerator._optimizers]
    return {
        **_named("model", [accelerator.unwrap_model(model) for model in accelerator._models]),
        **_named("optimizer", optimizers),
        **_named("scheduler", accelerator._schedulers),
        **_named("registered", accelerator._custom_objects),
        **({} if accelerator.scaler is None else {"scaler": accelerator.scaler}),
        "rng": PerRank(RngState()),
    }


def _named(kind: str, values: Iterable[Any]) -> dict[str, Any]:
    numbered = list(values)
    if len(numbered) == 1:
        return {kind: numbered[0]}
    return {f"{kind}{number}": value for number, value in enumerate(numbered)}
