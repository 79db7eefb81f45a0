"""A compiled training that saves after each step through a `Checkpointer`, with a simulated link."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from holdfast.config import TrainerConfig
from holdfast.telemetry.causes import Reason
from tests.support.compiled_training import CompiledTraining
from tests.unit.trainer_side.test_checkpointer import FakeLink
from trainer_side import joining
from trainer_side.checkpointer import Checkpointer
from trainer_side.save.copier import Copier, CopyJob
from trainer_side.save.gate import Gate

__all__ = ["STEPS", "Compile", "SavingTraining", "assert_same", "by_backend", "ends_without"]

STEPS = 4
SECONDS_MAX = 600  # a step may be compiled meanwhile
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


class SavingTraining:
    """A compiled training that saves after each step; the copy begins when somebody waits for it."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        pattern: str,
        compiled: Compile,
        *,
        device_bytes_max: str | None = None,
        **options: Any,
    ) -> None:
        self._device_bytes_max = device_bytes_max
        self.link = FakeLink()
        monkeypatch.setattr(joining, "connect_stager", self.link.meet)
        self.may_copy = _late_copies(monkeypatch)
        self.training = CompiledTraining(pattern, compiled, inside=self.save, **options)
        self.checkpointer: Checkpointer | None = None
        self._saves_inside = pattern == "save inside"
        self._wanted: dict[str, torch.Tensor] = {}
        self.returned_before_copy: list[bool] = []

    def begin(self) -> None:
        self.checkpointer = Checkpointer(
            self.training.state,
            config=TrainerConfig(
                events=None,
                in_flight_max=2,
                copy_seconds_max=60,
                copy_inside_ms_max=0,
                on_not_durable="warn",
                device_bytes_max=self._device_bytes_max,
            ),
        )

    def run(self, steps: range) -> None:
        for number in steps:
            self.training.step(number)
            if number > steps[0]:
                self._land(number - 1)
            if not self._saves_inside:
                self.save(number)
            self._wanted = self.training.tensors()
        self._land(steps[-1])

    def save(self, step: int) -> None:
        self.may_copy.clear()
        if self.checkpointer is not None:
            assert self.checkpointer.save(step)
            self.returned_before_copy.append(not self.may_copy.is_set())

    def _land(self, step: int) -> None:
        """See that the image has the state of `save()`."""
        self.may_copy.set()  # a mirror is waited for by no update
        image = self.link.bytes_of(step)
        assert step not in self.link.declined
        layout = self.link.layouts[-1]
        places = {tensor.path: layout.entries[tensor.entry] for tensor in layout.tensors}
        for name, wanted in self._wanted.items():
            entry = places[name]
            got = image[entry.offset : entry.offset + wanted.nbytes]
            assert got == wanted.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), (
                f"{name} at {step}"
            )
        self.link.stage(step)


def _late_copies(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A copy begins when this event is set, or when an update or `save()` waits for it."""
    may_copy, copy, wait, wait_idle = threading.Event(), Copier._copy, Gate._wait, Copier.wait

    def late_copy(copier: Copier, job: CopyJob) -> None:
        assert may_copy.wait(SECONDS_MAX)
        copy(copier, job)

    def waited_for(closed: Gate, until: Callable[[], bool]) -> None:
        may_copy.set()
        wait(closed, until)

    def waited_for_by_the_next_save(copier: Copier) -> Reason | None:
        may_copy.set()
        stuck = wait_idle(copier)
        may_copy.clear()
        return stuck

    monkeypatch.setattr(Copier, "_copy", late_copy)
    monkeypatch.setattr(Copier, "wait", waited_for_by_the_next_save)
    monkeypatch.setattr(Gate, "_wait", waited_for)
    return may_copy


def by_backend(backend: str, **options: Any) -> Compile:
    return lambda call: torch.compile(call, backend=backend, **options)


def ends_without(
    pattern: str, compiled: Compile, steps: int = STEPS, **options: Any
) -> dict[str, torch.Tensor]:
    training = CompiledTraining(pattern, compiled, **options)
    for number in range(steps):
        training.step(number)
    torch._dynamo.reset()
    return training.tensors()


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    assert [name for name, one in wanted.items() if not torch.equal(got[name], one)] == []
