"""Classes of modules, optimizers and tensors that are split among the ranks, or hold more than their bytes.

    at the start     a module or an optimizer in the state ─► refuse_split_objects ─► StateError, the same on every rank
    at a save        a tensor subclass ─► subclass_refusal ─► sent to all ranks with PROPOSE

A DTensor knows which part of the whole it is, so it is saved (split_tensor.py). The others are refused here. Classes
are matched by name, so that no package is imported. Sharded state without a class of its own (plain tensors, pipeline
stages with equal names, experts) is found by its bytes: `holdfast/wire/replica_proof.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from holdfast.errors import StateError

_FSDP2 = "Use fully_shard (FSDP2), whose model and optimizer are saved as they are"
_SPLIT = "hand over each part as Split(tensor, shape, start), of which the checkpoint makes whole tensors"
_STAGES = "Hand over the module of this rank's stage, with the names of the whole model: the checkpoint has all stages"
_PARTS = "as PerRank(..., same_ranks=True), which keeps each rank's own and comes back on as many ranks"


class _SplitKind(NamedTuple):
    what: str
    advice: str


# By module and name of a class, or of one that it inherits from; a module that ends with a dot stands for all in it.
_OBJECTS = {
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": _SplitKind(
        "an FSDP1 module (FullyShardedDataParallel), which has a part of each parameter on each rank", _FSDP2
    ),
    "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer": _SplitKind(
        "a ZeroRedundancyOptimizer, which has a part of the moments on each rank",
        f"{_FSDP2}; or hand over its inner optimizer, `{{path}}.optim`, {_PARTS}",
    ),
    "torch.distributed.pipelining.stage._PipelineStageBase": _SplitKind(
        "a pipeline stage, which is other layers on each rank", _STAGES
    ),
    "torch.distributed.pipelining._IR.Pipe": _SplitKind(
        "a pipeline, of which each rank trains one stage", _STAGES
    ),
    "deepspeed.runtime.engine.DeepSpeedEngine": _SplitKind(
        "a DeepSpeed engine, which has a part of the optimizer, and with ZeRO-3 of the model, on each rank",
        f"{_FSDP2}; or save it with engine.save_checkpoint",
    ),
    "deepspeed.runtime.": _SplitKind(
        "an optimizer of DeepSpeed, which has a part of the state on each rank",
        f"{_FSDP2}; or save it with engine.save_checkpoint",
    ),
    "fairscale.": _SplitKind(
        "of FairScale, which has a part of the state on each rank", f"{_FSDP2}; or hand it over {_PARTS}"
    ),
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer": _SplitKind(
        "Megatron's distributed optimizer, which has a part of the state on each rank",
        f"In an object with a state_dict() of its own, {_SPLIT}; or hand it over {_PARTS}",
    ),
}
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.api.ShardedTensorBase"
_QUANTISED = ("torchao.", "bitsandbytes.", "optimum.quanto.", "hqq.", "quanto.")


def refuse_split_objects(state: Mapping[str, Any]) -> None:
    """Refuse objects whose class splits them among several ranks, before training and on every rank alike. StateError:
    has the class, the path and the remedy.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    if refusal := describe_split_object(state):
        raise StateError(refusal)


def describe_split_object(state: Mapping[str, Any]) -> str:
    """Describe the first object whose class splits it among the ranks: its path and the remedy; empty without one.
    `PerRank` values belong to one rank each.
    """
    for path, value in _objects(state):
        for kind in type(value).__mro__:
            found = _OBJECTS.get(_name(kind)) or _package_kind(kind, value)
            if found is not None:
                return (
                    f"{path} is {found.what} ({_name(type(value))}): a checkpoint of it would have rank 0's part "
                    f"alone. {found.advice.format(path=path)}"
                )
        if isinstance(value, torch.nn.Module) and (flat := _flat_parameter(value)):
            return f"{path}.{flat} is a flat parameter of FSDP1, of which each rank has a part. {_FSDP2}"
    return ""


def _objects(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield modules with their submodules, optimizers with those that they wrap, and other values as they are."""
    for name, value in state.items():
        if isinstance(value, torch.nn.Module):
            for below, module in value.named_modules():
                yield (f"{name}.{below}" if below else name), module
            continue
        yield name, value
        inner = getattr(value, "optimizer", None)
        if isinstance(inner, torch.optim.Optimizer) and inner is not value:
            yield f"{name}.optimizer", inner


def _package_kind(kind: type, value: Any) -> _SplitKind | None:
    """Return the kind of a class from a package with many; only optimizers and modules count."""
    if not (isinstance(value, torch.nn.Module | torch.optim.Optimizer) or hasattr(value, "param_groups")):
        return None
    packages = [name for name in _OBJECTS if name.endswith(".") and _name(kind).startswith(name)]
    return _OBJECTS[packages[0]] if packages else None


def _flat_parameter(module: torch.nn.Module) -> str:
    named = module.named_parameters(recurse=False)
    return next((name for name, parameter in named if getattr(parameter, "_is_flat_param", False)), "")


def subclass_refusal(tensor: torch.Tensor) -> str:
    """Return why a tensor subclass cannot be saved as the bytes of a storage, and the remedy."""
    kind = type(tensor)
    if any(_name(base) == _SHARDED_TENSOR for base in kind.__mro__):
        return f"a ShardedTensor, of which this rank has a part. {_FSDP2}; or {_SPLIT}"
    if is_quantised(kind):
        return (
            f"a quantised tensor ({_name(kind)}), which is more than one storage: save what is trained beside it (the "
            "adapters) and load the quantised weights from where they came from, or save dequantize() of it"
        )
    inner = getattr(kind, "__tensor_flatten__", None)
    if inner is not None:
        return (
            f"a tensor subclass ({_name(kind)}) made of other tensors: save those that its __tensor_flatten__() names, "
            "or a plain tensor made of it"
        )
    return (
        f"a tensor subclass ({_name(kind)}), whose own attributes would be lost: save "
        "tensor.as_subclass(torch.Tensor), and make the subclass of it again after restore"
    )


def is_quantised(kind: type) -> bool:
    """Whether the class, or a base of it, is from a library for quantised weights."""
    return any(_name(base).startswith(_QUANTISED) for base in kind.__mro__)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
