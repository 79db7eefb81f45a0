"""A step in pieces equals the plain step, bit for bit, for every optimizer of torch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import Optimizer

from tests.support.cluster import same
from tests.unit.trainer_side.save.conftest import on_mesh
from trainer_side.save.split_step import (
    StepArguments,
    collective_step_reason,
    run_closure,
    split_step,
    unsplittable_reason,
)
from trainer_side.state.split_tensor import local_of

STEPS = 4
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{}, {"foreach": True}, {"weight_decay": 0.1}],
    "Adadelta": [{}, {"foreach": True}],
    "Adafactor": [{"lr": 1e-2}, {"lr": 1e-2, "foreach": True}],
    "Adagrad": [{}, {"foreach": True}, {"fused": True}],
    "Adam": [
        {},
        {"foreach": True},
        {"fused": True},
        {"amsgrad": True, "weight_decay": 0.1},
        {"maximize": True},
    ],
    "AdamW": [{}, {"foreach": True}, {"fused": True}, {"amsgrad": True}],
    "Adamax": [{}, {"foreach": True}],
    "Muon": [{"lr": 1e-2}],
    "NAdam": [{}, {"foreach": True}, {"decoupled_weight_decay": True}],
    "RAdam": [{}, {"foreach": True}],
    "RMSprop": [{}, {"foreach": True, "momentum": 0.9}, {"centered": True}],
    "Rprop": [{}, {"foreach": True}],
    "SGD": [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True},
        {"lr": 0.1, "momentum": 0.9, "fused": True},
    ],
    "SparseAdam": [{}],
}
if not hasattr(torch.optim, "Muon"):  # before torch 2.9
    del OPTIONS["Muon"]
CASES = [(name, options) for name, all_options in OPTIONS.items() for options in all_options]
IDS = [f"{name}-{'-'.join(map(str, options)) or 'plain'}" for name, options in CASES]


def test_every_optimizer_of_torch_is_either_split_here_or_refused() -> None:
    known = {name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name, None), type)}
    assert known - {"Optimizer", "LBFGS"} == set(OPTIONS), (
        "torch brings an optimizer that nobody has looked at"
    )


def parameters_for(name: str) -> list[torch.nn.Parameter]:
    torch.manual_seed(5)
    shapes = (
        [(4, 3), (5, 5), (3, 7), (6, 2), (2, 2)]
        if name == "Muon"
        else [(4, 3), (5,), (3, 7), (1,), (2, 2, 2)]
    )
    return [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]


def gradients_for(name: str, parameters: list[torch.nn.Parameter], step: int) -> None:
    torch.manual_seed(100 + step)
    for index, parameter in enumerate(parameters):
        gradient = torch.randn_like(parameter)
        parameter.grad = gradient.to_sparse() if name == "SparseAdam" else gradient
        if index == 3 and step == 1:
            parameter.grad = None  # one that took no part in this step


def make(name: str, options: dict[str, Any]) -> tuple[list[torch.nn.Parameter], Optimizer]:
    parameters = parameters_for(name)
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.01}]
    if name == "SparseAdam":
        groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    return parameters, getattr(torch.optim, name)(groups, **options)


def in_random_pieces(
    optimizer: Optimizer, order: random.Random, taken: list[int] | None = None
) -> Callable[..., StepArguments | None]:
    """A pre-hook that frees the parameters in random order, some at a time; `taken`: pieces before the last."""

    def hook(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        held -= set(order.sample(sorted(held), order.randrange(len(held))))

        def more() -> None:
            assert held
            held.difference_update(order.sample(sorted(held), order.randint(1, len(held))))

        result = split_step(optimizer, (args, kwargs), held=lambda one: id(one) in held, wait_for_more=more)
        if result is not None and taken is not None:
            taken.append(1)
        return result

    return hook


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_pieces_in_any_order_give_the_same_bits(name: str, options: dict[str, Any]) -> None:
    plain_parameters, plain = make(name, options)
    parameters, optimizer = make(name, options)
    assert not unsplittable_reason(optimizer)
    pieces_taken: list[int] = []
    optimizer.register_step_pre_hook(in_random_pieces(optimizer, random.Random(7), pieces_taken))
    plain_schedule = torch.optim.lr_scheduler.ExponentialLR(plain, 0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(STEPS):
        gradients_for(name, plain_parameters, step)
        gradients_for(name, parameters, step)
        plain.step()
        optimizer.step()
        plain_schedule.step()
        schedule.step()
        for expected, found in zip(plain_parameters, parameters, strict=True):
            assert same(found.data, expected.data), step
        assert same(optimizer.state_dict(), plain.state_dict()), step
    assert pieces_taken, "no step was taken in pieces"
    assert not same(parameters[0].data, parameters_for(name)[0].data), "nothing was trained"


# -- parameters that are split among ranks -------------------------------------------------------------------


def local_state(optimizer: Optimizer) -> list[Any]:
    """All that it holds, as plain tensors."""
    states = [optimizer.state[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    return [
        {name: local_of(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()}
        for state in states
    ]


NOT_FOR_DTENSORS = {"Rprop", "SparseAdam", "Adafactor"}  # torch itself refuses
SPLIT_CASES = [
    (name, options)
    for name, options in CASES
    if name not in NOT_FOR_DTENSORS | {"Muon"} and not (options.get("fused") and not name.startswith("Adam"))
]


@pytest.mark.parametrize(("name", "options"), SPLIT_CASES)
def test_pieces_of_dtensors_give_the_same_bits_without_a_collective(
    mesh: DeviceMesh, name: str, options: dict[str, Any]
) -> None:
    made = []
    for _ in range(2):
        parameters = [torch.nn.Parameter(on_mesh(mesh, one)) for one in parameters_for(name)]
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.01}]
        made.append((parameters, getattr(torch.optim, name)(groups, **options)))
    (plain_parameters, plain), (parameters, optimizer) = made
    pieces_taken: list[int] = []
    optimizer.register_step_pre_hook(in_random_pieces(optimizer, random.Random(7), pieces_taken))
    before = local_of(parameters[0]).detach().clone()
    for step in range(STEPS):
        whole = parameters_for(name)
        gradients_for(name, whole, step)
        for one, first, second in zip(whole, plain_parameters, parameters, strict=True):
            first.grad, second.grad = (
                None if one.grad is None else on_mesh(mesh, one.grad) for _ in range(2)
            )
        plain.step()
        assert not collective_step_reason(optimizer)
        with CommDebugMode() as exchanged:  # type: ignore[no-untyped-call]
            optimizer.step()
        assert exchanged.get_total_counts() == 0
        for expected, found in zip(plain_parameters, parameters, strict=True):
            assert same(local_of(found).detach(), local_of(expected).detach()), step
        assert same(local_state(optimizer), local_state(plain)), step
    assert pieces_taken, "no step was taken in pieces"
    assert not same(local_of(parameters[0]).detach(), before), "nothing was trained"


@pytest.mark.skipif("Muon" not in OPTIONS, reason="this torch has no Muon")
def test_a_step_of_which_ranks_exchange_something_is_no_matter_of_one_rank(mesh: DeviceMesh) -> None:
    """In pieces, which are others on each rank, their collective operations would come in another order."""
    weight = torch.nn.Parameter(on_mesh(mesh, torch.ones(4, 4)))
    norm = torch.nn.Parameter(on_mesh(mesh, torch.ones(4), Replicate()))
    adam, muon = torch.optim.AdamW([weight, norm]), torch.optim.Muon([weight])
    weight.grad = on_mesh(mesh, torch.ones(4, 4))
    assert not collective_step_reason(adam), "no gradient of the other one yet"
    norm.grad = on_mesh(mesh, torch.ones(4), Replicate())
    assert not collective_step_reason(adam)
    adam.step()
    assert not collective_step_reason(adam)
    # As the backward of a normalisation with SequenceParallel gives it: this rank's sum of its part of the sequence.
    norm.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    assert "from (Partial(sum),) to (Replicate(),)" in collective_step_reason(adam)
    with CommDebugMode() as exchanged:  # type: ignore[no-untyped-call]
        adam.step()
    assert exchanged.get_total_counts() > 0, "if not, it could be taken in pieces"
    norm.grad = None
    adam.state[weight]["exp_avg"] = on_mesh(mesh, torch.zeros(4, 4), Shard(1))
    assert "from (Shard(dim=1),) to (Shard(dim=0),)" in collective_step_reason(adam)
    assert "Muon works on whole tensors" in collective_step_reason(muon)
    whole = torch.nn.Parameter(torch.ones(4, 4))
    whole.grad = torch.ones(4, 4)
    assert not collective_step_reason(torch.optim.Muon([whole]))


def test_the_gradient_scaler_and_hooks_see_a_whole_step() -> None:
    seen: list[int] = []
    results = []
    for split in (False, True):
        parameters, optimizer = make("AdamW", {"fused": True})
        if split:
            optimizer.register_step_pre_hook(in_random_pieces(optimizer, random.Random(3)))
        optimizer.register_step_post_hook(
            lambda one, args, kwargs: seen.append(sum(len(group["params"]) for group in one.param_groups))
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(STEPS):
            optimizer.zero_grad()
            torch.manual_seed(step)
            inputs = torch.randn(4)
            parts = [((parameter * inputs[i % 4]) ** 2).sum() for i, parameter in enumerate(parameters)]
            loss = torch.stack(parts).sum()
            if step == 2:
                loss = loss * float("inf")  # the scaler leaves this step out
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
        results.append(
            copy.deepcopy(optimizer.state_dict()) | {"weights": [p.data.clone() for p in parameters]}
        )
    assert same(results[0], results[1])
    assert set(seen) == {5}, "a hook saw a part of the parameters"


def test_a_failure_leaves_the_optimizer_as_it_was() -> None:
    parameters, optimizer = make("SGD", {"lr": 0.1})

    def hook(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
        def lost() -> None:
            raise TimeoutError

        held = id(parameters[0])
        return split_step(optimizer, (args, kwargs), held=lambda one: id(one) == held, wait_for_more=lost)

    gradients_for("SGD", parameters, 0)
    optimizer.register_step_pre_hook(hook)
    with pytest.raises(TimeoutError):
        optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 3]


def test_free_parameters_are_stepped_at_once_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of pieces is that of the waits, not of the parameters: foreach keeps its speed."""
    parameters, optimizer = make("AdamW", {"foreach": True})
    waits = 0

    def hook(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
        held = {id(parameter) for parameter in parameters[1:]}

        def more() -> None:
            nonlocal waits
            waits += 1
            held.clear()

        return split_step(optimizer, (args, kwargs), held=lambda one: id(one) in held, wait_for_more=more)

    gradients_for("AdamW", parameters, 0)
    optimizer.step()
    pieces: list[int] = []
    plain = torch.optim.AdamW.step.__wrapped__  # type: ignore[attr-defined]

    def counted(one: Optimizer, *args: Any) -> Any:
        pieces.append(sum(len(group["params"]) for group in one.param_groups))
        return plain(one, *args)

    monkeypatch.setattr(torch.optim.AdamW.step, "__wrapped__", counted)
    optimizer.register_step_pre_hook(hook)
    optimizer.step()
    assert (waits, pieces) == (1, [1]), "one piece before the wait; the rest is the step itself"


class Coupled(torch.optim.SGD):
    """Adds the mean of all gradients to each: parameters depend on each other."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Renamed(torch.optim.SGD):
    """Has torch's own step."""


def test_optimizers_that_may_couple_their_parameters_are_refused_by_name() -> None:
    parameters = parameters_for("SGD")
    assert "Coupled" in unsplittable_reason(Coupled(parameters, lr=0.1))
    assert "LBFGS" in unsplittable_reason(torch.optim.LBFGS(parameters))
    assert "capturable" in unsplittable_reason(torch.optim.Adam(parameters, capturable=True))
    assert not unsplittable_reason(Renamed(parameters, lr=0.1))


def test_a_closure_is_called_before_the_step_and_its_loss_is_the_step_s() -> None:
    parameters, optimizer = make("SGD", {"lr": 0.1})
    seen: list[bool] = []

    def early(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments:
        arguments, computed = run_closure((args, kwargs))
        seen.append(computed)
        return arguments

    optimizer.register_step_pre_hook(early)
    gradients_for("SGD", parameters, 0)
    calls: list[float] = []

    def closure() -> float:
        calls.append(len(calls) + 1.0)
        return calls[-1]

    assert optimizer.step() is None
    assert optimizer.step(closure) == 1.0
    assert optimizer.step(closure=closure) == 2.0
    assert seen == [False, True, True]
    assert calls == [1.0, 2.0]
