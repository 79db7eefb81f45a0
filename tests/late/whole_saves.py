"""A rank that trains on the late device and saves through its checkpointer, with a link simulated by the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from holdfast.config import TrainerConfig
from holdfast.image.layout import Layout
from tests.late.control import Copied, LateMachine
from tests.unit.trainer_side.test_checkpointer import FakeLink
from trainer_side import joining
from trainer_side.checkpointer import Checkpointer
from trainer_side.save.copier import Copier, CopyJob
from trainer_side.save.device_stream import _own_stream
from trainer_side.save.gate import Gate

__all__ = ["MIRROR", "DeviceRank", "as_late_as_may_be", "counted"]

# Strategy C; a mirror of the tensors that may change; a mirror of all.
MIRROR = pytest.mark.parametrize("mirror", ["0", "6MiB", "1GiB"], ids=["C", "part", "mirror"])

_BIG = 1 << 20  # elements
_SECONDS_MAX = 60


class DeviceRank:
    """Many small layers, a large one, a frozen one and a buffer, all on the device; an optimizer with moments.

    Args:
        ranks: Number of ranks of the job; the others do not exist.
        beside: Further entries of the state.
        settings: The checkpointer's.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        ranks: int = 1,
        beside: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.link = FakeLink()
        self.link.job.ranks = ranks
        # A large tensor is copied straight into the area, small ones are gathered first.
        self.link.job.chunk_bytes = 1 << 20
        monkeypatch.setattr(joining, "connect_stager", self.link.meet)
        torch.manual_seed(0)
        small = [torch.nn.Linear(8, 8) for _ in range(40)]
        self.model = torch.nn.Sequential(torch.nn.Linear(1024, 512), *small).cuda()
        self.model.register_parameter(
            "base", torch.nn.Parameter(torch.zeros(_BIG, device="cuda"), requires_grad=False)
        )
        self.model.register_buffer("seen", torch.zeros(16, device="cuda"))
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.1, fused=True, capturable=True)
        for parameter in trained:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, **(beside or {})}
        self.checkpointer = Checkpointer(
            self.state,
            config=TrainerConfig(
                events=None,
                copy_seconds_max=60,
                copy_inside_ms_max=0,
                on_not_durable="warn",  # the link has no store
                **{"close_seconds_max": 0.5, **settings},
            ),
        )
        self._noted: dict[str, torch.Tensor] = {}

    def base(self) -> torch.nn.Parameter:
        """The frozen parameter."""
        return self.model.get_parameter("base")

    def save(self, step: int) -> bool:
        """As `Checkpointer.save`; also record the step's expected contents, in the order of the current stream."""
        self.note()
        return self.checkpointer.save(step)

    def note(self) -> None:
        """Record the expected contents of the next step that lands, in the order of the current stream."""
        self._noted = {f"model.{name}": one.detach().clone() for name, one in self.model.state_dict().items()}

    def update(self) -> None:
        """One step of the training."""
        self.optimizer.step()
        self.model.get_buffer("seen").add_(1)

    def land(self, step: int) -> None:
        """Wait for the copy, check that its bytes are those at `save()`, and free the area."""
        self.compare(self.link.bytes_of(step), self.link.layouts[-1], step)
        self.link.stage(step)

    def compare(self, image: bytes | memoryview, layout: Layout, step: int) -> None:
        """Check that the image holds the recorded tensors, and all bytes between them."""
        plan = self.checkpointer._saver._planner._plan
        assert plan is not None
        between, wanted_between = bytearray(image[: layout.image_bytes]), bytearray(layout.image_bytes)
        plan.skeleton.literals.write(0, memoryview(wanted_between))
        for entry in layout.entries:
            between[entry.offset : entry.end] = wanted_between[entry.offset : entry.end] = bytes(entry.nbytes)
        assert between == wanted_between, f"zip headers of step {step}"
        looked = 0
        for tensor in layout.tensors:
            name = tensor.path.replace("/", ".")
            if name in self._noted:
                entry = layout.entries[tensor.entry]
                wanted = self._noted[name].cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                assert image[entry.offset : entry.offset + entry.nbytes] == wanted, f"{name} of step {step}"
                looked += 1
        assert looked == len(self._noted)

    def own_stream(self) -> int:
        """The stream that holdfast uses on the device."""
        return int(_own_stream(self.base().device).cuda_stream)


def as_late_as_may_be(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Delay each copy until the returned event is set, or until the training thread waits for the copy."""
    may_begin, copy, wait = threading.Event(), Copier._copy, Gate.wait

    def late_copy(copier: Copier, job: CopyJob) -> None:
        assert may_begin.wait(_SECONDS_MAX)
        copy(copier, job)

    def waited_for(gate: Gate) -> None:
        may_begin.set()
        wait(gate)

    monkeypatch.setattr(Copier, "_copy", late_copy)
    monkeypatch.setattr(Gate, "wait", waited_for)
    return may_begin


@contextmanager
def counted(late: LateMachine, *streams: int) -> Iterator[list[Copied]]:
    """Count the bytes that are copied on each of these streams in the block."""
    before = [late.copied(stream) for stream in streams]
    found: list[Copied] = []
    yield found
    found += [
        Copied(*(now - had for now, had in zip(late.copied(stream), earlier, strict=True)))
        for stream, earlier in zip(streams, before, strict=True)
    ]
