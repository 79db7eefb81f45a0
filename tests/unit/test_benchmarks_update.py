"""What the gate is measured with: an update that stands in for a device's, and a gate that is made coarse."""

from __future__ import annotations

import importlib
import threading
import time

import pytest
import torch

from benchmarks import device_update
from benchmarks.rank import force_gate
from benchmarks.workload import Workload
from trainer_side.save import gate as gates
from trainer_side.save import split_step

_SECONDS_MAX = 60.0


def test_a_devices_update_sleeps_for_what_it_updates_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adam = importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(adam, "adam", adam.adam)  # put back at the end
    workload = Workload("flat-4-1")
    slept: list[float] = []
    monkeypatch.setattr("benchmarks.device_update.time.sleep", slept.append)
    device_update.install(workload, 2.0)
    before = [parameter.detach().clone() for parameter in workload.model.parameters()]
    workload.update()
    assert sum(slept) == pytest.approx(2.0)
    assert all(map(torch.equal, before, workload.model.parameters()))
    half = list(workload.model.parameters())[:2]
    for parameter in half:
        parameter.grad = None
    slept.clear()
    workload.update()
    assert sum(slept) == pytest.approx(1.0)


@pytest.mark.parametrize(("coarse", "updated_early"), [(True, 0.0), (False, 0.25)])
def test_a_coarse_gate_holds_what_is_copied_already(
    coarse: bool, updated_early: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    adam = importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(adam, "adam", adam.adam)
    monkeypatch.setattr(gates, "split_step", split_step.split_step)  # put back at the end
    workload = Workload("flat-4-1")
    updated: list[float] = []
    real_sleep = time.sleep
    monkeypatch.setattr("benchmarks.device_update.time.sleep", updated.append)
    device_update.install(workload, 1.0)
    gate = gates.Gate([workload.optimizer])
    force_gate(coarse=coarse)
    _, *being_copied = [p.untyped_storage().data_ptr() for p in workload.model.parameters()]
    gate.close()
    gate.hold(being_copied)  # the first one is copied already
    training = threading.Thread(target=workload.update)
    training.start()
    deadline = time.monotonic() + _SECONDS_MAX
    while not gate._waiting:  # the update has come to the gate
        assert time.monotonic() < deadline
        real_sleep(0.001)
    early = sum(updated)
    gate.open()
    training.join(_SECONDS_MAX)
    gate.remove()
    assert early == pytest.approx(updated_early)
    assert sum(updated) == pytest.approx(1.0)
