"""This rank's own values: opened, joined by name and checked after all bytes are read, and before any object is loaded.

    tree   {"expert_optimizer": [blob of rank 0, blob of rank 1]}     names behind each value (`position_names.py`)
    after  {"expert_optimizer": {"state": {…}, "param_groups": […]}}  of this rank, in the order of the script

The content of a blob is unknown before it is read. If one may be refused, nothing is read in place.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from holdfast.errors import StateError
from trainer_side.restore.joining_by_name import join_by_name
from trainer_side.restore.mismatch import misfit
from trainer_side.restore.torch_loading import rewrap
from trainer_side.state.optimizer_places import located, optimizers_of
from trainer_side.state.per_rank import PerRank, unmarked
from trainer_side.state.per_rank_blob import beside_of, decode
from trainer_side.state.position_names import Positions, from_record, tensor_lists
from trainer_side.state.tree import telling

_log = logging.getLogger("holdfast.restore")


def may_refuse(state: Mapping[str, Any]) -> bool:
    """Whether a value of the state that each rank has for itself may not be the one that was saved."""
    own = [value.value for value in state.values() if isinstance(value, PerRank)]
    return any(isinstance(one, torch.nn.Module) or optimizers_of({"": one}) for one in own)


def open_own(
    state: Mapping[str, Any],
    live: Mapping[str, Any],
    tree: dict[str, Any],
    names: Positions,
    *,
    rank: int,
) -> None:
    """Put this rank's values into the tree in place of all ranks' blobs. Training thread, before `load`.

    A value that the checkpoint does not have for this rank is taken out of the tree, and named in the log.

    `live`: Result of `live_trees`. `tree`: The saved tree, with all bytes that this rank takes; is changed. `names`:
    The names in the file.

    Raises:
        DamageError: A value in the file is not a blob.
        StateError: A value does not fit, or parameters of an optimizer in it have no counterpart; names them.
    """
    inner = unmarked(state)
    for name, value in state.items():
        if not isinstance(value, PerRank) or name not in tree:
            continue
        blobs = tree[name]
        if rank >= len(blobs):
            _log.warning(
                "%s: the checkpoint has values of %d ranks and none for rank %d, so that rank keeps the script's value",
                name,
                len(blobs),
                rank,
            )
            del tree[name]
            continue
        what = f"{name} of rank {rank}"
        tree[name] = decode(blobs[rank], name=what)
        own = {**names, **from_record(beside_of(blobs[rank]), source=what)}
        held = inner[name]
        if isinstance(held, torch.nn.Module):
            rewrap({name: held}, {name: held.state_dict()}, tree)
        if isinstance(held, torch.nn.Module | torch.optim.Optimizer):
            wrong = misfit(name, held, tree[name], ranks=len(blobs))
            if wrong:
                raise StateError(f"{wrong}; nothing was loaded")
        with telling(optimizers_of({name: held})) as given:
            here = value.snapshot()
        optimizers = located({name: here}, {name: held}, given)
        if optimizers or any(tensor_lists(name, held, here)):
            join_by_name(inner, {**live, name: here}, tree, own, optimizers)
