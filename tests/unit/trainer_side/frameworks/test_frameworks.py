"""The parts of trainer_side/frameworks without MPI: messages, the loader with a length, random numbers."""

from __future__ import annotations

import importlib
import sys
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from holdfast.errors import ConfigError, StateError
from trainer_side import ResumableSampler
from trainer_side.frameworks.epochs import EpochLoader
from trainer_side.frameworks.missing import ReloadableRngState

DATA = TensorDataset(torch.arange(23))


@pytest.mark.parametrize("framework", ["lightning", "transformers", "accelerate"])
def test_a_missing_framework_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, framework: str
) -> None:
    module = f"trainer_side.frameworks.{framework}"
    for name in [name for name in sys.modules if name.split(".")[0] == framework or name == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, framework, None)
    with pytest.raises(ConfigError, match=rf"needs {framework}, .*pip install {framework}"):
        importlib.import_module(module)


def made(sampler: ResumableSampler) -> EpochLoader:
    return EpochLoader(DataLoader(DATA, batch_sampler=sampler.ahead(5)))


def test_an_epoch_loader_has_the_whole_batches_of_an_epoch_and_goes_on_where_it_was() -> None:
    through = made(ResumableSampler(len(DATA), seed=1, rank=0, ranks=2, drop_last=True))
    assert len(through) == 2
    expected = [batch[0].tolist() for batch in islice(through, 7)]
    stopped = made(ResumableSampler(len(DATA), seed=1, rank=0, ranks=2, drop_last=True))
    got = [batch[0].tolist() for batch in islice(stopped, 3)]
    resumed = made(ResumableSampler(len(DATA), seed=1, rank=0, ranks=2, drop_last=True))
    resumed.load_state_dict(stopped.state_dict())
    for _ in range(2):  # a loop that restarts the loader for each epoch
        got += [batch[0].tolist() for batch in islice(resumed, 2)]
    assert got == expected


def test_an_epoch_loader_takes_a_length_and_is_never_empty() -> None:
    sampler = ResumableSampler(3, seed=1, rank=0, ranks=2)
    loader = DataLoader(DATA, batch_sampler=sampler.ahead(5))
    assert len(EpochLoader(loader)) == 1
    assert len(EpochLoader(loader, batches=100)) == 100


def test_a_loader_of_another_sampler_is_refused() -> None:
    with pytest.raises(StateError, match=r"takes its samples from BatchSampler.*sampler\.ahead"):
        EpochLoader(DataLoader(DATA, batch_size=5))


def test_random_numbers_are_brought_back_twice_and_then_left_alone() -> None:
    numbers = ReloadableRngState()
    saved = numbers.state_dict()
    expected = torch.rand(3)
    numbers.load_state_dict(saved)
    assert torch.equal(torch.rand(3), expected)
    numbers.reload()
    assert torch.equal(torch.rand(3), expected)
    numbers.reload()
    assert not torch.equal(torch.rand(3), expected)
