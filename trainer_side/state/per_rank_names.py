"""The names of what a `PerRank` value has by number only: each rank's own stand in its blob, behind the value.

{"expert": PerRank(module), "expert_optimizer": PerRank(optimizer)}
blob of expert_optimizer    length │ state_dict() │ {"expert_optimizer": [["expert/up.weight", …]]} │ zeros
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainer_side.state.optimizer_places import located, optimizers_of, telling
from trainer_side.state.per_rank import PerRank
from trainer_side.state.position_names import Parameters, Position, opened, positions, to_trailer


class PerRankNames:
    """Keeps `PerRank.names` up to date for all values of this rank's state. Training thread.

    Args:
        state: As the script gave it.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._known: dict[str, tuple[Parameters, bytes]] = {}

    def look(self, tree: Mapping[str, Any], *, is_new: bool = False) -> None:
        """Make the names of those values again whose optimizers have other parameters, or another order of them.

        Args:
            tree: What was collected of the state.
            is_new: The tensors of the state are others, so all names are made again.
        """
        for name, value in self._state.items():
            if not isinstance(value, PerRank):
                continue
            known = self._known.get(name)
            if is_new or known is None or known[0].have_changed():
                known = self._known[name] = self._made(name, value, tree)
            value.names = known[1]

    def _made(self, name: str, value: PerRank, tree: Mapping[str, Any]) -> tuple[Parameters, bytes]:
        optimizers = optimizers_of({name: value.value})
        try:
            found = own_positions(self._state, tree, name, value, optimizers)
        except Exception:  # noqa: BLE001 - the script's own code; the save that follows says what is wrong with it
            found = {}
        return Parameters(optimizers), to_trailer(found)


def own_positions(
    state: Mapping[str, Any],
    tree: Mapping[str, Any],
    name: str,
    value: PerRank,
    optimizers: list[torch.optim.Optimizer],
) -> dict[str, list[list[Position]]]:
    """The names of what one value of the state has in its optimizers and lists, by path; it stands for its inner one.

    Args:
        state: The state.
        tree: What it gave.
        name: Of the value in it.
        value: The value.
        optimizers: Those in it.
    """
    with telling(optimizers) as given:
        whole = {**tree, name: value.snapshot()}
    here = opened(state)
    found = positions(here, whole, located({name: whole[name]}, {name: here[name]}, given))
    return {path: groups for path, groups in found.items() if path == name or path.startswith(f"{name}/")}
