"""Nightly, more of tests/integration/test_frameworks.py: takes minutes, mostly imports."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.errors import ConfigError
from tests.integration import test_frameworks as nightly
from tests.integration.test_frameworks import RANKS, SAVES, SECONDS_MAX, STEPS, check_goes_on
from tests.support.cluster import load

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(4 * SECONDS_MAX)]

test_a_killed_run_goes_on_to_the_bit = nightly.check_a_killed_run_goes_on_to_the_bit


def test_a_killed_run_of_the_trainer_goes_on_to_the_bit(tmp_path: Path) -> None:
    check_goes_on(tmp_path, "transformers", STEPS, SAVES, saved=29, pause_at=33)


def test_a_killed_run_of_lightning_goes_on_to_the_bit(tmp_path: Path) -> None:
    # An epoch has 15 batches, and validation follows the last one: a save due there comes a step later.
    arguments = ("--steps", "50", "--every", "5", "--batch-size", "50")
    saves = {4, 9, 15, 19, 24, 30, 34, 39, 45, 49}
    check_goes_on(tmp_path, "lightning", arguments, saves, saved=30, pause_at=33)


def check_sharded(directory: Path, name: str, *arguments: str, saves: set[int], saved: int) -> None:
    """The run resumes under FSDP2; each rank has held a part of the model, and the last step's file the whole."""
    check_goes_on(directory, name, arguments, saves, saved=saved, pause_at=33)
    (file,) = directory.glob(f"store/step-{max(saves):09d}*.pt")
    whole = torch.load(file, weights_only=True)["model"]
    parts = [load(directory / f"cluster-2/final-{rank}.pt")["model"] for rank in range(RANKS)]
    assert [list(part) for part in parts] == [list(whole)] * RANKS
    assert all(torch.equal(whole[key], torch.cat([part[key] for part in parts])) for key in whole)


@pytest.mark.parametrize("name", ["transformers", "accelerate"])
def test_a_killed_run_under_fsdp2_goes_on_to_the_bit(tmp_path: Path, name: str) -> None:
    check_sharded(tmp_path, name, *STEPS, "--sharded", saves=SAVES, saved=29)


def test_lightnings_model_parallel_strategy_goes_on_to_the_bit(tmp_path: Path) -> None:
    # An epoch has 15 batches, and validation follows the last one: a save due there comes a step later.
    arguments = ("--steps", "40", "--every", "5", "--batch-size", "50", "--sharded")
    saves = {4, 9, 15, 19, 24, 30, 34, 39}
    check_sharded(tmp_path, "lightning", *arguments, saves=saves, saved=30)


def test_a_loop_like_torchtitans_goes_on_to_the_bit(tmp_path: Path) -> None:
    # The last step is saved although it is not due.
    saves = {4, 9, 14, 19, 24, 29, 34, 37}
    check_sharded(tmp_path, "torchtitan", "--steps", "38", "--every", "5", saves=saves, saved=29)


def refusal(refuse: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as refused:
        refuse()
    return str(refused.value)


def test_model_splitting_by_other_strategies_is_refused_by_name() -> None:
    from accelerate import Accelerator, DistributedType
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

    from trainer_side.frameworks.accelerate import prepared
    from trainer_side.frameworks.lightning import HoldfastCallback as ForLightning
    from trainer_side.frameworks.transformers import HoldfastCallback as ForTrainer

    for strategy in (FSDPStrategy, DeepSpeedStrategy):
        trainer: Any = SimpleNamespace(strategy=strategy.__new__(strategy))
        said = refusal(partial(ForLightning().on_fit_start, trainer, trainer))
        assert strategy.__name__ in said
        assert "ModelParallelStrategy" in said

    whole = {"is_deepspeed_enabled": False, "is_fsdp_xla_enabled": False, "is_fsdp_enabled": False}
    fsdp1 = SimpleNamespace(is_fsdp2=False)
    for is_so, name in (
        ({"is_deepspeed_enabled": True}, "DeepSpeed"),
        ({"is_fsdp_enabled": True, "is_fsdp_xla_enabled": True}, "XLA"),
        ({"is_fsdp_enabled": True}, "FSDP1"),
        ({"model_init": lambda: None}, "model_init"),
    ):
        trainer = SimpleNamespace(accelerator=fsdp1, **{"model_init": None, **whole, **is_so})
        assert name in refusal(partial(ForTrainer().restore, trainer))

    accelerator = Accelerator(cpu=True)
    kept = accelerator.state.distributed_type
    try:
        for kind, name in (
            (DistributedType.FSDP, "FSDP with fsdp_version 1; set fsdp_version: 2"),
            (DistributedType.DEEPSPEED, "DEEPSPEED"),
            (DistributedType.MEGATRON_LM, "MEGATRON_LM"),
        ):
            accelerator.state.distributed_type = kind
            accelerator.state.fsdp_plugin = SimpleNamespace(fsdp_version=1)
            assert name in refusal(partial(prepared, accelerator))
    finally:
        accelerator.state.distributed_type = kept
