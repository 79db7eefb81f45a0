"""Hugging Face's Accelerate: the objects that an `Accelerator` has prepared, as the state of a `Checkpointer`.

    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.register_for_checkpointing(average)
    with Checkpointer({**prepared(accelerator), "data": sampler}, every=100) as checkpointer:

`accelerator.prepare` returns wrappers. Holdfast uses the objects inside, because it can delay the step of a plain
optimizer but not of a wrapper. Objects are numbered in the order in which they were prepared.
docs/guides/accelerate.md says more.
"""

from __future__ import annotations

from typing import Any

from holdfast.errors import ConfigError
from trainer_side.frameworks.missing import missing_framework, numbered
from trainer_side.state.per_rank import PerRank
from trainer_side.state.rng import RngState

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
except ImportError as error:
    raise missing_framework("accelerate", error) from error

__all__ = ["prepared"]

_WHOLE = {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}


def prepared(accelerator: Accelerator) -> dict[str, Any]:
    """Return the state of a `Checkpointer`: all objects that `accelerator` has prepared, and each rank's random state.

    The state has the models, optimizers, schedulers, the gradient scaler and the registered objects. A single object of
    its kind is named `model`, `optimizer`, `scheduler` or `registered`; several are named `model0`, `model1` and so on.
    Loaders are left out: add a `ResumableSampler` to the state, and do not prepare the loader that reads it, because
    Accelerate would divide its batches among the ranks a second time. With FSDP2 (`fsdp_version: 2`) the model and the
    optimizer's moments are DTensors, of which each rank saves its part.

    Args:
        accelerator: The Accelerator, after calls of `prepare` and `register_for_checkpointing`.

    Raises:
        ConfigError: The Accelerator shards models by FSDP1, DeepSpeed or Megatron-LM, or it has prepared no model.
    """
    if accelerator.distributed_type not in _WHOLE and not accelerator.is_fsdp2:
        fsdp1 = accelerator.distributed_type == DistributedType.FSDP
        raise ConfigError(
            "accelerate: expected an Accelerator with plain data parallelism or with FSDP2, this Accelerator is "
            f"{accelerator.distributed_type}{' with fsdp_version 1' if fsdp1 else ''}; set fsdp_version: 2 "
            "(FullyShardedDataParallelPlugin(fsdp_version=2)), or use plain data parallelism"
        )
    if not accelerator._models:
        raise ConfigError(
            "accelerate: this Accelerator has prepared no model; call prepared() after accelerator.prepare()"
        )
    return {
        **numbered("model", [accelerator.unwrap_model(model) for model in accelerator._models]),
        **numbered("optimizer", [optimizer.optimizer for optimizer in accelerator._optimizers]),
        **numbered("scheduler", accelerator._schedulers),
        **numbered("registered", accelerator._custom_objects),
        **({} if accelerator.scaler is None else {"scaler": accelerator.scaler}),
        "rng": PerRank(RngState()),
    }
