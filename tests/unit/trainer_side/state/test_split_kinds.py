"""State that is split among ranks is recognized by class, and the advice in the error can be followed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trainer_side import PerRank
from trainer_side.state import split_kinds
from trainer_side.state.split_kinds import describe_split_object
from trainer_side.state.tree import tensor_refusal


def of_module(name: str, base: type, **more: Any) -> type:
    module, _, kind = name.rpartition(".")
    return type(kind, (base,), {"__module__": module, **more})


def optimizer(kind: type) -> Any:
    return kind([nn.Parameter(torch.ones(2))])


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel", "an FSDP1 module"),
        ("deepspeed.runtime.engine.DeepSpeedEngine", "a DeepSpeed engine"),
        ("deepspeed.runtime.pipe.engine.PipelineEngine", "of DeepSpeed"),
        ("torch.distributed.pipelining._IR.Pipe", "a pipeline"),
        ("fairscale.nn.data_parallel.fully_sharded_data_parallel.FullyShardedDataParallel", "of FairScale"),
    ],
)
def test_a_module_is_known_wherever_it_is(name: str, what: str) -> None:
    kind = of_module(name, nn.Module)
    inner = nn.Sequential(nn.Linear(2, 2), of_module("users.Own", kind)())
    assert f"model.1 is {what}" in describe_split_object({"model": inner}).replace("an optimizer of", "of")
    assert not describe_split_object({"model": nn.Sequential(nn.Linear(2, 2))})


@pytest.mark.parametrize(
    "name",
    [
        "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer",
        "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer",
    ],
)
def test_an_optimizer_is_known_also_within_another(name: str) -> None:
    inner = optimizer(of_module(name, torch.optim.SGD))
    assert "opt is " in describe_split_object({"opt": inner})
    wrapping = optimizer(torch.optim.SGD)
    wrapping.optimizer = inner
    assert "opt.optimizer is " in describe_split_object({"opt": wrapping})


def test_megatrons_is_known_though_it_is_no_torch_optimizer() -> None:
    kind = of_module("megatron.core.optimizer.distrib_optimizer.DistributedOptimizer", object)
    assert "opt is Megatron's distributed optimizer" in describe_split_object({"opt": kind()})


def test_a_flat_parameter_is_known_without_its_module() -> None:
    linear = nn.Linear(2, 2)
    vars(linear.weight)["_is_flat_param"] = True
    model = nn.Sequential(linear)
    assert "model.0.weight is a flat parameter of FSDP1" in describe_split_object({"model": model})


def test_a_ranks_own_value_may_be_of_any_kind() -> None:
    kind = of_module("torch.distributed.pipelining._IR.Pipe", nn.Module)
    assert not describe_split_object({"stage": PerRank(kind(), same_ranks=True)})


def test_a_single_rank_has_nothing_split() -> None:
    split_kinds.refuse_split_objects(
        {"model": of_module("torch.distributed.pipelining._IR.Pipe", nn.Module)()}
    )


def test_no_message_advises_what_loses_a_part() -> None:
    kind = of_module("torch.distributed._shard.sharded_tensor.api.ShardedTensorBase", torch.Tensor)
    reason = tensor_refusal(torch.ones(3).as_subclass(kind))
    assert reason is not None
    assert "a ShardedTensor" in reason
    assert "Use fully_shard (FSDP2)" in reason
    assert "Split(tensor, shape, start)" in reason
    assert "local tensor" not in reason


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        (
            "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer",
            ("fully_shard", "`opt.optim`"),
        ),
        ("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer", ("fully_shard", "engine.save_checkpoint")),
        ("fairscale.optim.oss.OSS", ("fully_shard", "PerRank(..., same_ranks=True)")),
        ("megatron.core.optimizer.distrib_optimizer.DistributedOptimizer", ("Split(tensor, shape, start)",)),
    ],
)
def test_the_advice_for_a_split_optimizer_needs_no_gather(name: str, advice: tuple[str, ...]) -> None:
    said = describe_split_object({"opt": optimizer(of_module(name, torch.optim.SGD))})
    assert all(words in said for words in advice), said
    assert "full_state_dict" not in said


@pytest.mark.parametrize(
    "name", ["torchao.dtypes.AffineQuantizedTensor", "bitsandbytes.nn.modules.Params4bit"]
)
def test_quantised_subclasses_are_known(name: str) -> None:
    base = nn.Parameter if name.endswith("Params4bit") else torch.Tensor
    tensor: torch.Tensor = torch.ones(3).as_subclass(of_module(name, base))
    assert f"a quantised tensor ({name})" in (tensor_refusal(tensor) or "")


def test_a_plain_subclass_can_be_made_plain() -> None:
    tensor: torch.Tensor = torch.ones(3).as_subclass(of_module("users.Marked", torch.Tensor))
    assert "as_subclass(torch.Tensor)" in (tensor_refusal(tensor) or "")
    assert tensor_refusal(tensor.as_subclass(torch.Tensor)) is None
