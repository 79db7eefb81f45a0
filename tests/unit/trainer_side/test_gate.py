"""The gate holds back exactly the update that would overwrite what is being copied."""

from __future__ import annotations

import threading

import torch

from trainer_side.gate import Gate


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
    stepped = threading.Event()

    def train() -> None:
        optimizer.step()
        stepped.set()

    thread = threading.Thread(target=train)
    thread.start()
    assert not stepped.wait(0.05)
    assert parameter.tolist() == [1.0] * 4
    waited_seconds = gate.open()
    thread.join(10)
    assert stepped.is_set()
    assert parameter.tolist() == [0.0] * 4
    assert waited_seconds > 0


def test_every_optimizer_is_held_back() -> None:
    (_, first), (_, second) = _optimizer(), _optimizer()
    gate = Gate([first, second])
    gate.close()
    threads = [threading.Thread(target=optimizer.step) for optimizer in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(0.05)
        assert thread.is_alive()
    gate.open()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_nobody_waited_is_no_stall() -> None:
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
