"""The gate delays exactly the update that would overwrite memory that is being copied."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from tests.unit.trainer_side.save.conftest import on_mesh
from trainer_side.save.gate import Gate
from trainer_side.state.split_tensor import local_of


def _optimizer() -> tuple[torch.nn.Parameter, torch.optim.SGD]:
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    return parameter, torch.optim.SGD([parameter], lr=1.0)


def test_an_open_gate_lets_updates_pass() -> None:
    parameter, optimizer = _optimizer()
    gate = Gate([optimizer])
    optimizer.step()
    assert not gate.closed
    assert parameter.tolist() == [0.0] * 4


def test_a_closed_gate_holds_the_update_until_it_opens() -> None:
    parameter, optimizer = _optimizer()
    gate = Gate([optimizer])
    gate.close()
    gate.hold([_address(parameter)])
    stepped = threading.Event()

    def train() -> None:
        optimizer.step()
        stepped.set()

    thread = threading.Thread(target=train)
    thread.start()
    _until(lambda: bool(gate._waiting))
    assert not stepped.wait(0.05)
    assert parameter.tolist() == [1.0] * 4
    waited_seconds = gate.open()
    thread.join(60)
    assert stepped.is_set()
    assert parameter.tolist() == [0.0] * 4
    assert waited_seconds > 0


def test_every_optimizer_is_held_back() -> None:
    (one, first), (other, second) = _optimizer(), _optimizer()
    gate = Gate([first, second])
    gate.close()
    gate.hold([_address(one), _address(other)])
    threads = [threading.Thread(target=optimizer.step) for optimizer in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(0.05)
        assert thread.is_alive()
    gate.open()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_a_gate_without_waiters_has_no_stall() -> None:
    ticks = iter(range(100))
    gate = Gate([], clock=lambda: float(next(ticks)))
    gate.close()
    assert gate.open() == 0.0


def test_removed_hooks_hold_nothing_back() -> None:
    parameter, optimizer = _optimizer()
    gate = Gate([optimizer])
    gate.close()
    gate.remove()
    optimizer.step()
    assert parameter.tolist() == [0.0] * 4


# -- layer by layer ------------------------------------------------------------------------------------------


def _layers(count: int, **options: Any) -> tuple[list[torch.nn.Parameter], torch.optim.AdamW]:
    torch.manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(4)) for _ in range(count)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, **options)
    for parameter in parameters:
        parameter.grad = torch.ones(4)
    optimizer.step()  # state exists from now on
    return parameters, optimizer


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _addresses(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> list[int]:
    return [_address(parameter), *(_address(value) for value in optimizer.state[parameter].values())]


class Step(threading.Thread):
    """optimizer.step() in a thread of its own; `parts` says when which parameters changed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(daemon=True)
        self._optimizer = optimizer
        self.start()

    def run(self) -> None:
        self._optimizer.step()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_layer_is_updated_as_soon_as_it_is_copied_and_not_before() -> None:
    parameters, optimizer = _layers(3)
    gate = Gate([optimizer])
    before = [parameter.detach().clone() for parameter in parameters]

    def changed() -> list[bool]:
        return [not torch.equal(now, old) for now, old in zip(parameters, before, strict=True)]

    gate.close()
    gate.hold([address for parameter in parameters for address in _addresses(optimizer, parameter)])
    step = Step(optimizer)
    gate.release(_addresses(optimizer, parameters[1])[:-1])
    time.sleep(0.05)
    assert changed() == [False, False, False], "one tensor of its state was still to be copied"
    gate.release(_addresses(optimizer, parameters[1])[-1:])
    _until(lambda: changed() == [False, True, False])
    gate.release(_addresses(optimizer, parameters[0]))
    _until(lambda: changed() == [True, True, False])
    assert step.is_alive()
    gate.release(_addresses(optimizer, parameters[2]))
    step.join(60)
    assert changed() == [True, True, True]
    assert gate.closed, "the copy itself has not said that it is over"
    assert gate.open() > 0


def test_tensors_copied_by_another_rank_are_not_waited_for() -> None:
    """Another rank copies the rest: its slice is no business of this one."""
    parameters, optimizer = _layers(2)
    gate = Gate([optimizer])
    gate.close()
    gate.hold([])
    optimizer.step()
    assert gate.open() == 0.0
    gate.close()
    gate.hold(_addresses(optimizer, parameters[0]))
    before = parameters[1].detach().clone()
    step = Step(optimizer)
    _until(lambda: not torch.equal(parameters[1], before))
    assert step.is_alive()
    gate.open()
    step.join(60)


def test_parameters_of_one_storage_are_held_together() -> None:
    flat = torch.zeros(8)
    parameters = [torch.nn.Parameter(flat[:4]), torch.nn.Parameter(flat[4:])]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    for parameter in parameters:
        parameter.grad = torch.ones(4)
    gate = Gate([optimizer])
    gate.close()
    gate.hold([_address(flat)])
    step = Step(optimizer)
    time.sleep(0.05)
    assert flat.tolist() == [0.0] * 8
    gate.release([_address(flat)])
    step.join(60)
    assert flat.tolist() == [-1.0] * 8


def test_a_hook_that_comes_later_still_sees_everything_before_the_update() -> None:
    parameters, optimizer = _layers(2)
    gate = Gate([optimizer])
    seen: list[bool] = []
    before = [parameter.detach().clone() for parameter in parameters]

    def clip(*_: object) -> None:
        seen.append(all(torch.equal(now, old) for now, old in zip(parameters, before, strict=True)))
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)

    optimizer.register_step_pre_hook(clip)
    gate.close()
    gate.hold(_addresses(optimizer, parameters[1]))
    step = Step(optimizer)
    _until(lambda: not torch.equal(parameters[0], before[0]))
    assert parameters[0].grad is not None
    assert float(parameters[0].grad.norm()) < 0.1
    gate.open()
    step.join(60)
    assert seen == [True]


# -- parameters that are split among ranks -------------------------------------------------------------------


def test_a_shard_is_held_until_it_is_copied(mesh: DeviceMesh) -> None:
    """A storage of a DTensor is that of the part that is here."""
    parameters = [torch.nn.Parameter(on_mesh(mesh, torch.ones(4, 2))) for _ in range(3)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = on_mesh(mesh, torch.ones(4, 2))
    optimizer.step()
    shards = [local_of(parameter).detach() for parameter in parameters]
    assert [shard.shape for shard in shards] == [(2, 2)] * 3
    before = [shard.clone() for shard in shards]
    gate = Gate([optimizer])

    def changed() -> list[bool]:
        return [not torch.equal(now, old) for now, old in zip(shards, before, strict=True)]

    addresses = [
        [_address(local_of(tensor)) for tensor in (parameter, *optimizer.state[parameter].values())]
        for parameter in parameters
    ]
    gate.close()
    assert list(gate.update_order()) == [address for some in addresses for address in some]
    gate.hold([address for some in addresses for address in some])
    step = Step(optimizer)
    _until(lambda: bool(gate._waiting))
    assert changed() == [False, False, False]
    gate.release(addresses[1])
    _until(lambda: changed() == [False, True, False])
    gate.release(addresses[0][:1])
    time.sleep(0.05)
    assert changed() == [False, True, False], "its moments are still to be copied"
    gate.release([*addresses[0][1:], *addresses[2]])
    step.join(60)
    assert changed() == [True, True, True]
    gate.open()


def test_a_step_that_ranks_take_together_waits_for_all(
    mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    parameters = [torch.nn.Parameter(on_mesh(mesh, torch.ones(4), Replicate())) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    parameters[0].grad = on_mesh(mesh, torch.ones(4), Replicate())
    parameters[1].grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    gate = Gate([optimizer])
    gate.close()
    gate.hold([_address(local_of(parameters[1]))])
    with caplog.at_level(logging.WARNING):
        step = Step(optimizer)
        _until(lambda: bool(gate._waiting))
        time.sleep(0.05)
        assert local_of(parameters[0]).tolist() == [1.0] * 4, "it was not held, and the step is one"
        gate.open()
        step.join(60)
    assert local_of(parameters[0]).tolist() == [0.0] * 4
    (record,) = caplog.records
    assert (
        "a step of SGD brings gradients or moments from (Partial(sum),) to (Replicate(),)" in record.message
    )


class Coupled(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_an_optimizer_that_may_couple_parameters_waits_for_all_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    optimizer = Coupled([parameter], lr=1.0)
    gate = Gate([optimizer])
    assert not caplog.records, "nothing shows yet that its updates come to the gate"
    gate.close()
    gate.hold([])
    with caplog.at_level(logging.WARNING):
        step = Step(optimizer)
        time.sleep(0.05)
        assert parameter.tolist() == [1.0] * 4
        gate.open()
        step.join(60)
    assert [record.message for record in caplog.records] == [
        "Coupled has a step of its own, which may treat its parameters together; its updates wait for the whole copy"
    ]
    assert parameter.tolist() == [0.0] * 4


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_computes_gradients_once_and_its_step_waits_layer_by_layer(by_name: bool) -> None:
    parameters, optimizer = _layers(2)
    expected, plain = _layers(2)
    for parameter in expected:
        parameter.grad = torch.full_like(parameter, 3.0)
    plain.step()
    before = [parameter.detach().clone() for parameter in parameters]
    gate = Gate([optimizer])
    gate.close()
    gate.hold(_addresses(optimizer, parameters[1]))
    calls: list[bool] = []
    losses: list[Any] = []

    def closure() -> float:
        calls.append(gate.closed and torch.is_grad_enabled())
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 3.0)
        return 1.5

    def step() -> None:
        losses.append(optimizer.step(closure=closure) if by_name else optimizer.step(closure))

    thread = threading.Thread(target=step)
    thread.start()
    _until(lambda: torch.equal(parameters[0], expected[0]))
    assert torch.equal(parameters[1], before[1]), "it was still being copied"
    gate.open()
    thread.join(60)
    assert torch.equal(parameters[1], expected[1])
    assert calls == [True]
    assert losses == [1.5]


@pytest.mark.parametrize("closed", [False, True])
def test_a_closure_is_called_once_where_nothing_is_held(closed: bool) -> None:
    (parameter,), optimizer = _layers(1)
    gate = Gate([optimizer])
    if closed:
        gate.close()
        gate.hold([])
    before = parameter.detach().clone()
    calls: list[float] = []

    def closure() -> float:
        calls.append(0.5)
        return 0.5

    assert optimizer.step(closure) == 0.5
    assert calls == [0.5]
    assert not torch.equal(parameter, before)


def test_optimizers_that_step_in_backward_give_the_order_of_updates() -> None:
    pairs = [_layers(1) for _ in range(3)]
    gate = Gate([optimizer for _, optimizer in pairs])
    for _, optimizer in reversed(pairs):
        optimizer.step()
    expected = [
        address for (parameter,), optimizer in reversed(pairs) for address in _addresses(optimizer, parameter)
    ]
    order = gate.update_order()
    assert list(order) == expected
    assert list(order.values()) == list(range(len(expected)))
    assert not gate.order_changed
    pairs[2][1].step()
    assert gate.order_changed, "another one came last"


# The compiler uses parts of torch that torch itself calls deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_compiled_step_waits_as_well() -> None:
    parameter, optimizer = _optimizer()
    gate = Gate([optimizer])
    compiled = torch.compile(optimizer.step, backend="eager")
    compiled()
    assert parameter.tolist() == [0.0] * 4
    gate.close()
    gate.hold([_address(parameter)])
    thread = threading.Thread(target=compiled, daemon=True)
    thread.start()
    thread.join(1.0)
    assert parameter.tolist() == [0.0] * 4, "it went past the gate"
    gate.open()
    thread.join(60)
    assert parameter.tolist() == [-1.0] * 4


def test_tensors_copied_between_the_look_and_the_wait_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (parameter,), optimizer = _layers(1)
    late: list[bool] = []
    gate = Gate([optimizer], seconds_max=2.0, on_late=lambda: late.append(True))

    def unlucky(
        _: object, __: object, *, held: Callable[[torch.Tensor], bool], wait_for_more: Callable[[], None]
    ) -> None:
        assert held(parameter)
        gate.release(_addresses(optimizer, parameter))
        wait_for_more()

    monkeypatch.setattr("trainer_side.save.gate.split_step", unlucky)
    gate.close()
    gate.hold(_addresses(optimizer, parameter))
    optimizer.step()
    assert not late
