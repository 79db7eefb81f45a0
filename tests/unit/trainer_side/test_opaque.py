"""holdfast functions called from compiled code run as plain Python, with everything that they call."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from holdfast.config import TrainerConfig
from tests.support.compiled_training import no_compiled_code, traced_code
from tests.unit.trainer_side.test_checkpointer import FakeLink
from trainer_side import Checkpointer, ResumableSampler, ResumableStream, SeededSamples, joining
from trainer_side.data.sampler import ReadAhead
from trainer_side.frameworks.epochs import EpochLoader
from trainer_side.opaque import opaque_methods

LENGTH, BATCH = 40, 2


@pytest.fixture(autouse=True)
def _no_compiled_code() -> Iterator[None]:
    with no_compiled_code():
        yield


def _sampler() -> ResumableSampler:
    return ResumableSampler(LENGTH, seed=3, rank=0, ranks=1)


@pytest.mark.parametrize("of", [Checkpointer, ResumableSampler, ResumableStream, ReadAhead, EpochLoader])
def test_each_method_and_property_that_a_script_may_call_is_opaque(of: type) -> None:
    found = {
        name: member.fget if isinstance(member, property) else member
        for name, member in vars(of).items()
        if not name.startswith("_") and (callable(member) or isinstance(member, property))
    }
    assert found
    assert [name for name, one in found.items() if not hasattr(one, "_torchdynamo_disable")] == []


def test_a_generator_cannot_be_opaque() -> None:
    class Endless:
        def batches(self) -> Iterator[int]:
            yield 1

    with pytest.raises(TypeError, match=r"Endless.batches is a generator: return an OpaqueIterator"):
        opaque_methods(Endless)


def test_a_compiled_loop_takes_the_samples_of_a_plain_one() -> None:
    data = torch.arange(LENGTH)

    def take(sampler: ResumableSampler) -> tuple[list[Any], list[Any]]:
        batches = sampler.batches(BATCH)
        first = [next(batches) for _ in range(3)]
        rest = []
        loader: DataLoader[Any] = DataLoader(data, batch_sampler=sampler.ahead(BATCH))  # type: ignore[arg-type]
        for batch in sampler.follow(loader):
            rest.append((batch * 2).tolist())
            if len(rest) == 3:
                return first, rest
        raise AssertionError

    plain, compiled = _sampler(), _sampler()
    wanted = take(plain)
    with traced_code() as traced:
        assert torch.compile(take, backend="eager")(compiled) == wanted
    assert compiled.state_dict() == plain.state_dict()
    assert traced == set()


def test_other_members_of_a_checkpointer_run_in_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    link = FakeLink()
    monkeypatch.setattr(joining, "connect_stager", link.meet)
    model = torch.nn.Linear(4, 4)
    checkpointer = Checkpointer({"model": model}, config=TrainerConfig(events=None))
    seen: list[Any] = []

    def step(number: int) -> None:
        checkpointer.wait_copied()
        with checkpointer.changing(), torch.no_grad():
            model.weight.add_(1)
        checkpointer.step(number)
        seen.append((checkpointer.stats, checkpointer.durable_step, checkpointer.rank))

    before = model.weight.detach().clone()
    with traced_code() as traced:
        compiled = torch.compile(step, backend="eager")
        for number in range(3):
            compiled(number)
            link.job.durable_step = number
    assert traced == set()
    assert torch.equal(model.weight, before + 3)
    assert [durable_step for _, durable_step, _ in seen] == [-1, 0, 1]
    checkpointer.close()


def test_augmentations_in_a_compiled_loop_are_those_of_a_plain_one() -> None:
    class Noisy:
        def __len__(self) -> int:
            return LENGTH

        def __getitem__(self, index: int) -> float:
            return index + float(torch.rand(()))

    samples = SeededSamples(Noisy(), seed=5)
    wanted = [samples[0, index] for index in range(3)]
    with traced_code() as traced:
        assert torch.compile(lambda: [samples[0, index] for index in range(3)], backend="eager")() == wanted
    assert traced == set()


def test_the_compiler_is_not_loaded_for_what_nobody_compiles() -> None:
    program = """
import sys
from trainer_side import ResumableSampler
sampler = ResumableSampler(10, seed=1, rank=0, ranks=1)
print(next(sampler.batches(2)), "torch._dynamo" in sys.modules)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.split("]")[1].strip() == "False"
