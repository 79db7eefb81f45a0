"""A script trains something that its checkpoints lack: named once, by path. A plain script gets no message."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import _global_optimizer_pre_hooks

from holdfast.config import TrainerConfig
from holdfast.errors import StateError
from trainer_side.checkpointer import Checkpointer
from trainer_side.state.per_rank import PerRank


class Job:
    """One process with a tier in a folder; each `open` is a new attempt of the same run."""

    def __init__(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        self._config = TrainerConfig(
            tiers=[f"file:{folder / 'tier'}"], store=str(folder / "run"), create=True, on_full="wait"
        )
        self._caplog = caplog
        self._open: list[Checkpointer] = []

    def open(self, state: Mapping[str, Any], *, restores: bool = False) -> Checkpointer:
        self.close()
        self._caplog.clear()
        checkpointer = Checkpointer(state, config=self._config, fresh=not restores)
        self._open.append(checkpointer)
        if restores:
            assert checkpointer.restore() > 0
        return checkpointer

    def close(self) -> None:
        while self._open:
            self._open.pop().close()

    @property
    def said(self) -> list[str]:
        wanted = ("holdfast.trainer",)
        usual = ("no hook of an optimizer was called", "fresh=True", "holdfast saves ", "a new run: ")
        texts = [one.getMessage() for one in self._caplog.records if one.name in wanted]
        return [text for text in texts if not any(part in text for part in usual)]


@pytest.fixture
def job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Job]:
    caplog.set_level(logging.WARNING, "holdfast.trainer")
    made = Job(tmp_path, caplog)
    yield made
    made.close()


def small_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def train(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model(torch.randn(2, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def saved(job: Job) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = job.open({"model": model, "optimizer": optimizer})
    train(model, optimizer)
    assert checkpointer.save(0)


@pytest.mark.parametrize("restores", [False, True])
def test_a_plain_script_is_told_nothing(job: Job, *, restores: bool) -> None:
    saved(job)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = job.open({"model": model, "optimizer": optimizer}, restores=restores)
    for step in range(1, 5):
        train(model, optimizer)
        assert checkpointer.save(step)
    assert job.said == []


def test_gradients_that_stay_until_the_next_step_are_no_sign(job: Job) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = job.open({"model": model, "optimizer": optimizer})
    for step in range(3):
        optimizer.zero_grad(set_to_none=step == 1)
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        assert checkpointer.save(step)
    assert job.said == []


def test_an_optimizer_that_was_made_again_after_restore(job: Job) -> None:
    saved(job)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = job.open({"model": model, "optimizer": optimizer}, restores=True)
    again = torch.optim.AdamW(model.parameters())
    train(model, again)
    assert checkpointer.save(1)
    (said,) = job.said
    assert said.startswith("AdamW steps model/0.weight, and the state does not have this optimizer")
    assert "was it made again?" in said


def test_an_optimizer_without_moments_that_was_made_again(job: Job) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = job.open({"model": model, "optimizer": optimizer})
    again = torch.optim.SGD(model.parameters(), lr=0.2)
    train(model, again)
    assert checkpointer.save(0)
    (said,) = job.said
    assert said.startswith("SGD steps model/0.weight")


def test_a_module_that_was_made_again_after_restore(job: Job) -> None:
    saved(job)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = job.open({"model": model, "optimizer": optimizer}, restores=True)
    model[1] = nn.Linear(4, 4)
    train(model, optimizer)
    assert checkpointer.save(1)
    assert [text.split(";")[0] for text in job.said[:2]] == [
        "model/1.weight is another tensor now, with the script's own values",
        "model/1.bias is another tensor now, with the script's own values",
    ]
    assert job.said[2].startswith(
        "optimizer steps parameter 2 of group 0 (shape [4, 4]) and 1 more, and no part"
    )


def test_weights_that_were_tied_after_restore(job: Job) -> None:
    saved(job)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    job.open({"model": model, "optimizer": optimizer}, restores=True)
    model[0].weight = model[1].weight
    train(model, optimizer)
    assert [text.split(";")[0] for text in job.said] == [
        "model/0.weight is now the same tensor as model/1.weight"
    ]


def test_weights_that_were_equal_and_are_tied_after_restore(job: Job) -> None:
    tied = small_model()
    tied[1].weight = tied[0].weight
    job.open({"model": tied}).save(0)
    model = small_model()
    job.open({"model": model}, restores=True)
    model[1].weight = model[0].weight
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert job.said == []


def test_parameters_that_only_have_another_name_after_restore(job: Job) -> None:
    saved(job)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = job.open({"model": model, "optimizer": optimizer}, restores=True)
    torch.nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity())
    train(model, optimizer)
    assert checkpointer.save(1)
    assert job.said == []


def test_a_parameter_that_no_part_of_the_state_holds(job: Job) -> None:
    model, head = small_model(), nn.Linear(4, 1)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()])
    checkpointer = job.open({"model": model, "optimizer": optimizer})
    head(model(torch.randn(2, 4))).sum().backward()
    optimizer.step()
    assert checkpointer.save(0)
    (said,) = job.said
    assert said.startswith(
        "optimizer steps parameter 4 of group 0 (shape [1, 4]) and 1 more, and no part of the state"
    )


def test_a_parameter_in_a_tensor_or_an_object_or_per_rank_is_held(job: Job) -> None:
    class Own:
        def __init__(self) -> None:
            self.scale = nn.Parameter(torch.ones(3))

        def state_dict(self) -> dict[str, Any]:
            return {"scale": self.scale.detach().clone()}  # a copy

        def load_state_dict(self, saved: dict[str, Any]) -> None:
            self.scale.data.copy_(saved["scale"])

    own, bare, mine = Own(), nn.Parameter(torch.ones(5)), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([own.scale, bare, *mine.parameters()])
    state = {"own": own, "bare": bare, "mine": PerRank(mine), "optimizer": optimizer}
    checkpointer = job.open(state)
    (own.scale.sum() + bare.sum() + mine(torch.ones(2)).sum()).backward()
    optimizer.step()
    assert checkpointer.save(0)
    assert job.said == []


class MasterWeights:
    """Steps float32 copies of the weights, and writes them over the weights. Saves the optimizer alone."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = [*model.parameters()]
        self.masters = [weight.detach().float().clone().requires_grad_() for weight in self.weights]
        self.inner = torch.optim.SGD(self.masters, lr=0.1)

    def step(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
        self.inner.step()
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                weight.copy_(master)
                weight.grad = None
                master.grad = None

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.inner.load_state_dict(saved)


def test_master_copies_that_overwrite_restored_weights(job: Job) -> None:
    model = small_model().bfloat16()
    wrapper = MasterWeights(model)
    checkpointer = job.open({"model": model, "optimizer": wrapper})
    model(torch.randn(2, 4).bfloat16()).sum().backward()
    wrapper.step()
    assert checkpointer.save(0)
    (said,) = job.said
    assert said.startswith("optimizer steps parameter 0 of group 0 (shape [4, 4]) and 3 more")
    assert "the fp32 master copy of model/0.weight" in said


class TakesGroups:
    """As LARC: takes the list of groups when it is made, and scales learning rates in it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.inner.load_state_dict(saved)


def test_a_wrapper_with_groups_of_its_own(job: Job) -> None:
    model = small_model()
    wrapper = TakesGroups(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    job.open({"model": model, "optimizer": wrapper}).save(0)
    assert job.said == []
    wrapper.load_state_dict(wrapper.state_dict())  # torch makes new groups
    job.open({"model": model, "optimizer": wrapper}).save(1)
    (said,) = job.said
    assert said.startswith("optimizer: param_groups of TakesGroups and of the SGD inside it are two lists")


def test_a_schedule_without_a_scheduler_in_the_state(job: Job) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, 1)
    job.open({"model": model, "optimizer": optimizer, "scheduler": scheduler}).save(0)
    assert job.said == []
    job.open({"model": model, "optimizer": optimizer, "mine": {"scheduler": scheduler.state_dict()}}).save(0)
    assert job.said == []
    job.open({"model": model, "optimizer": optimizer}).save(0)
    (said,) = job.said
    assert said.startswith("optimizer: its groups have initial_lr")


class OwnSchedule:
    """As timm's: no scheduler of torch, and no `last_epoch` in its state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]

    def state_dict(self) -> dict[str, int]:
        return {"warmup": 3}

    def load_state_dict(self, saved: dict[str, int]) -> None: ...


def test_a_scheduler_that_is_not_torchs_is_known_by_its_optimizer(job: Job) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.open({"model": model, "optimizer": optimizer, "scheduler": OwnSchedule(optimizer)}).save(0)
    assert job.said == []


def test_a_scheduler_of_another_optimizer(job: Job) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    job.open({"model": model, "optimizer": optimizer, "scheduler": StepLR(other, 1)}).save(0)
    (said,) = job.said
    assert said.startswith("scheduler: StepLR drives a SGD that is not in the state")


@pytest.mark.parametrize("stepped_before", [False, True])
def test_gradients_in_the_middle_of_an_accumulation(job: Job, *, stepped_before: bool) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = job.open({"model": model, "optimizer": optimizer})
    if stepped_before:
        train(model, optimizer)
    model(torch.randn(2, 4)).sum().backward()
    assert checkpointer.save(0)
    (said,) = job.said
    assert said.startswith(
        "optimizer: parameter 0 of group 0 (shape [4, 4]) has a gradient that no step has used yet"
    )


def test_a_scaler_may_skip_a_step(job: Job) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    checkpointer = job.open({"model": model, "optimizer": optimizer, "scaler": scaler})
    scaler.scale(model(torch.full((2, 4), float("inf"))).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert checkpointer.save(0)
    optimizer.zero_grad()
    train(model, optimizer)
    assert checkpointer.save(1)
    assert job.said == []


def test_a_parameter_that_was_trained_and_is_frozen_now(job: Job) -> None:
    saved(job)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model[1].bias.requires_grad_(False)
    job.open({"model": model, "optimizer": optimizer}, restores=True)
    (said,) = job.said
    assert said.startswith(
        "model/1.bias: the checkpoint has moments of optimizer for it, and requires_grad is False"
    )


class Counting(nn.Module):
    """Counts its calls in a buffer that `state_dict()` leaves out. A constant is written again, as DDP does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.inner.register_buffer("calls", torch.zeros(()), persistent=False)
        self.register_buffer("constant", torch.ones(3), persistent=False)
        self.register_buffer("cache", torch.ones(1), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.inner.get_buffer("calls").add_(1)
        constant, cache = self.get_buffer("constant"), self.get_buffer("cache")
        constant.copy_(constant.clone())
        self.cache = torch.ones(len(cache) + 1)
        outputs: torch.Tensor = self.inner(inputs)
        return outputs


def test_a_buffer_that_is_not_persistent_is_named_if_training_changes_it(job: Job) -> None:
    model = Counting()
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = job.open({"model": model, "optimizer": optimizer})
    for step in range(4):
        train(model, optimizer)
        assert checkpointer.save(step)
    (said,) = job.said
    assert said.startswith("model/inner.calls is a buffer that is not persistent, and training changes it")


def test_each_is_said_once_and_the_hooks_are_taken_off(job: Job) -> None:
    gc.collect()  # what other tests have left
    before = len(_global_optimizer_pre_hooks)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = job.open({"model": model})
    for step in range(4):
        train(model, optimizer)
        assert checkpointer.save(step)
    assert len(job.said) == 1
    assert len(_global_optimizer_pre_hooks) == before


def test_values_that_are_put_into_the_dictionary_later_are_taken(job: Job) -> None:
    state: dict[str, Any] = {"epoch": 0, "model": small_model()}
    checkpointer = job.open(state)
    state["extra"] = torch.ones(3)
    assert checkpointer.save(0)
    state["epoch"], state["extra"], state["note"] = 1, torch.full((3,), 2.0), "late"
    assert checkpointer.save(1)
    state["extra"], state["mine"] = torch.full((5,), 3.0), PerRank({"a": 1})
    assert checkpointer.save(2)
    fresh: dict[str, Any] = {
        "epoch": 0,
        "model": small_model(),
        "extra": torch.zeros(5),
        "mine": PerRank({}),
        "note": "",
    }
    restored = job.open(fresh, restores=True).restored
    assert restored is not None
    assert restored.step == 2
    assert restored.values["epoch"] == 1
    assert restored.values["note"] == "late"
    assert fresh["extra"].tolist() == [3.0] * 5
    assert fresh["mine"].value == {"a": 1}


def test_objects_that_are_put_into_the_dictionary_later_are_refused(job: Job) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    checkpointer = job.open(state)
    state["scheduler"] = StepLR(optimizer, 1)
    with pytest.raises(StateError, match=r"scheduler: expected the objects .* got a StepLR that was added"):
        checkpointer.save(0)
    del state["scheduler"]
    state["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        StateError, match=r"optimizer: expected the objects .* got a SGD that is another object now"
    ):
        checkpointer.save(0)
    state["optimizer"] = optimizer
    assert checkpointer.save(0)


def test_objects_that_are_put_into_the_dictionary_before_restore_are_refused(job: Job) -> None:
    saved(job)
    job.close()
    model = small_model()
    state: dict[str, Any] = {"model": model}
    checkpointer = Checkpointer(state, config=job._config)
    try:
        state["optimizer"] = torch.optim.AdamW(model.parameters())
        with pytest.raises(StateError, match="got a AdamW that was added"):
            checkpointer.restore()
    finally:
        checkpointer.close()
