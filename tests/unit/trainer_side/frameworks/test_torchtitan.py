"""The checkpoint manager for torchtitan's loop, with a Checkpointer that records its calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.errors import ConfigError
from trainer_side import PerRank, ResumableSampler
from trainer_side.frameworks import torchtitan
from trainer_side.frameworks.epochs import EpochLoader
from trainer_side.frameworks.torchtitan import HoldfastCheckpointManager


class Noting:
    """Replaces the Checkpointer, and records its calls."""

    def __init__(self, state: dict[str, Any], *, config: Any, every: int) -> None:
        self.state, self.config, self.every = state, config, every
        self.told: list[tuple[str, Any]] = []
        self.restored: object = None
        self.has: object = None

    def step(self, step: int) -> bool:
        self.told.append(("step", step))
        return bool(self.every and (step + 1) % self.every == 0)

    def save(self, step: int) -> bool:
        self.told.append(("save", step))
        return True

    def restore(self, *, step: int | None) -> None:
        self.told.append(("restore", step))
        self.restored = self.has

    def wait_copied(self) -> None:
        self.told.append(("wait_copied", None))

    def close(self) -> None:
        self.told.append(("close", None))


class Loader:
    """With a state of this rank."""

    def __init__(self) -> None:
        self.place = 3

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        self.place = saved["place"]


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchtitan, "Checkpointer", Noting)


def made(*, dataloader: Any = None, parts: int = 1, states: Any = None, **config: Any) -> Any:
    model = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    return HoldfastCheckpointManager(
        SimpleNamespace(**{"interval": 4, **config}),
        dataloader=dataloader,
        model_parts=[model] * parts,
        optimizers=optimizers,
        lr_schedulers=Loader(),
        states={} if states is None else states,
        sd_adapter=object(),
        base_folder="out",
    )


def noted(manager: Any) -> Any:
    return manager.checkpointer


def test_steps_from_1_are_saved_when_due_and_at_the_last_one_once() -> None:
    manager = made()
    begun = [manager.save(step, last_step=step == 6) for step in range(1, 7)]
    assert begun == [False, False, False, True, False, True]
    steps: list[tuple[str, Any]] = [("step", step) for step in range(6)]
    assert noted(manager).told == [*steps, ("save", 5)]
    due = made()
    assert due.save(4, last_step=True)
    assert noted(due).told == [("step", 3)]


def test_a_due_step_that_was_declined_is_not_begun_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = made()
    monkeypatch.setattr(noted(manager), "step", lambda _: False)
    assert not manager.save(8, last_step=True)
    assert noted(manager).told == []


def test_the_first_step_is_saved_if_it_is_asked_for() -> None:
    manager = made(enable_first_step_checkpoint=True)
    assert [manager.save(step) for step in (1, 2)] == [True, False]


def test_a_manager_that_only_loads_saves_nothing() -> None:
    manager = made(load_only=True)
    assert not manager.save(4, last_step=True)
    assert noted(manager).told == []


@pytest.mark.parametrize(("step", "restored"), [(-1, None), (7, 6)])
def test_load_says_whether_there_was_a_checkpoint(step: int, restored: int | None) -> None:
    manager = made()
    assert not manager.load(step)
    noted(manager).has = object()
    assert manager.load(step)
    assert noted(manager).told == [("restore", restored)] * 2


def test_the_loop_waits_for_the_copy_and_for_the_end() -> None:
    manager = made()
    manager.maybe_wait_for_staging()
    manager.close()
    assert noted(manager).told == [("wait_copied", None), ("close", None)]


def test_a_manager_that_is_not_enabled_does_nothing() -> None:
    manager = made(enable=False, initial_load_path="/somewhere")
    assert manager.checkpointer is None
    assert not manager.load()
    assert not manager.save(4, last_step=True)
    manager.maybe_wait_for_staging()
    manager.close()


def test_optimizers_are_taken_out_of_their_container_and_a_loader_is_each_ranks_own() -> None:
    loader, trainer = Loader(), Loader()
    state = noted(made(dataloader=loader, states={"train_state": trainer})).state
    assert list(state) == [
        "model", "optimizer0", "optimizer1", "lr_scheduler", "dataloader", "train_state", "rng",
    ]  # fmt: skip
    assert isinstance(state["dataloader"], PerRank)
    assert state["dataloader"].value is loader
    assert state["dataloader"].same_ranks
    assert state["train_state"] is trainer


def test_the_place_of_a_resumable_sampler_is_the_same_for_any_number_of_ranks() -> None:
    sampler = ResumableSampler(8, seed=1, rank=0, ranks=2)
    loader = EpochLoader(DataLoader(TensorDataset(torch.arange(8)), batch_sampler=sampler.ahead(2)))
    assert noted(made(dataloader=loader)).state["dataloader"] is loader


def test_state_excluded_from_loading_is_saved_and_stays_as_it_is() -> None:
    loader = Loader()
    held = noted(made(dataloader=loader, exclude_from_loading=["dataloader"])).state["dataloader"]
    assert not held.same_ranks
    assert held.snapshot() == {"place": 3}
    held.load({"place": 9})
    assert loader.place == 3


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"initial_load_path": "/a"}, "initial_load_path; .*holdfast import"),
        ({"initial_load_in_hf": True}, "initial_load_in_hf; .*holdfast import"),
        ({"initial_load_in_hf_quantized": True}, "initial_load_in_hf_quantized; .*holdfast import"),
        ({"last_save_in_hf": True}, "last_save_in_hf; .*holdfast export"),
        ({"create_seed_checkpoint": True}, "create_seed_checkpoint"),
        ({"parts": 2}, "one model part on each rank, got 2"),
        ({"states": {"model": 1, "rng": 2}}, "states has model, rng"),
        ({"exclude_from_loading": ["optimizer0"]}, "'optimizer0', expected names of lr_scheduler"),
        ({"exclude_from_loading": ["data"]}, "'data', expected names of lr_scheduler"),
    ],
)
def test_torchtitan_options_that_holdfast_lacks_are_refused_by_name(
    given: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        made(**given)
