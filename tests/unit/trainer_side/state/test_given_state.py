"""The script's dictionary after the Checkpointer was made: accepted and refused values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.errors import StateError
from trainer_side.state.per_rank import PerRank
from trainer_side.state.tree import UserState


@pytest.mark.parametrize("name", ["", "a/b", 3])
def test_names_are_texts_without_a_slash(name: Any) -> None:
    with pytest.raises(StateError, match="names in the state"):
        UserState({name: 1})
    given: dict[Any, Any] = {}
    state = UserState(given)
    given[name] = 1
    with pytest.raises(StateError, match="names in the state"):
        state.refresh()


def test_new_values_are_taken_into_the_same_dictionary() -> None:
    given: dict[str, Any] = {"epoch": 0, "best": torch.zeros(2), "log": [1]}
    state = UserState(given)
    held, better, mine = state.current, torch.ones(2), PerRank(3)
    given.update(epoch=1, best=better, mine=mine)
    given["log"].append(2)
    assert state.try_refresh() is None
    assert state.current is held
    assert held == {"epoch": 1, "best": better, "log": [1, 2], "mine": mine}


@pytest.mark.parametrize("name", ["model", "late"])
def test_objects_are_refused_by_name(name: str) -> None:
    given: dict[str, Any] = {"model": torch.nn.Linear(2, 2)}
    state = UserState(given)
    given[name] = torch.nn.Linear(2, 2)
    problem = state.try_refresh()
    assert problem is not None
    assert str(problem).startswith(f"{name}: expected the objects")
    assert state.current["model"] is not given["model"] or name == "late"


def test_a_value_in_the_place_of_an_object_is_refused() -> None:
    given: dict[str, Any] = {"model": torch.nn.Linear(2, 2)}
    state = UserState(given)
    given["model"] = {"weight": torch.zeros(2, 2)}
    with pytest.raises(
        StateError, match=r"model: expected the objects .* got a dict that is another object now"
    ):
        state.refresh()
