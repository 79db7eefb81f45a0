"""A holder of an optimizer's list of groups still shares it after a saved state was loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainer_side.restore.loading import same_group_lists


def optimizer_of(lr: float) -> torch.optim.Optimizer:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups: list[dict[str, Any]] = [
        {"params": [*part.parameters()], "lr": lr * (n + 1)} for n, part in enumerate(model)
    ]
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return optimizer


def test_lists_and_dictionaries_stay_and_have_what_was_saved() -> None:
    saved, optimizer = optimizer_of(0.5).state_dict(), optimizer_of(0.1)
    groups, members = optimizer.param_groups, [*optimizer.param_groups]
    parameters = [group["params"] for group in members]
    with same_group_lists(optimizer):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups is groups
    assert all(one is other for one, other in zip(groups, members, strict=True))
    assert [group["lr"] for group in groups] == [0.5, 1.0]
    assert all(
        one is other
        for group, before in zip(groups, parameters, strict=True)
        for one, other in zip(group["params"], before, strict=True)
    )


def optimizer_of_rates(*rates: torch.Tensor) -> torch.optim.Optimizer:
    layers = [nn.Linear(2, 2) for _ in rates]
    return torch.optim.SGD(
        [{"params": [*one.parameters()], "lr": lr} for one, lr in zip(layers, rates, strict=True)]
    )


def test_a_rate_that_the_script_holds_as_a_tensor_stays_the_one_of_the_group() -> None:
    """The script fills it before each step, perhaps in compiled code."""
    rate, own = torch.tensor(0.5), torch.tensor(0.1)
    saved, optimizer = optimizer_of_rates(rate, rate).state_dict(), optimizer_of_rates(own, own)
    with same_group_lists(optimizer):
        optimizer.load_state_dict(saved)
    assert all(group["lr"] is own for group in optimizer.param_groups)
    assert own == rate


def test_a_shared_rate_does_not_replace_several_of_the_checkpoint() -> None:
    own = torch.tensor(0.1)
    optimizer = optimizer_of_rates(own, own)
    with same_group_lists(optimizer):
        optimizer.load_state_dict(optimizer_of_rates(torch.tensor(0.5), torch.tensor(0.25)).state_dict())
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.25]
    assert own == torch.tensor(0.1)


class Sharpness(torch.optim.Optimizer):
    """As SAM: hands its groups on after it has loaded them."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.inner.param_groups = self.param_groups

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.inner.param_groups = self.param_groups


def test_a_wrapper_that_hands_its_groups_on_is_left_alone() -> None:
    wrapper = Sharpness(optimizer_of(0.1))
    with same_group_lists(wrapper):
        wrapper.load_state_dict(Sharpness(optimizer_of(0.5)).state_dict())
    assert wrapper.inner.param_groups is wrapper.param_groups
    assert [group["lr"] for group in wrapper.param_groups] == [0.5, 1.0]
