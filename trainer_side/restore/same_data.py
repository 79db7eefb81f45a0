"""Compares the samplers of all ranks before a run begins or resumes.

A checkpoint has the place in the data from rank 0. If another rank has a sampler for other data, its samples are
repeated and left out from the first step on, and no later job can resume the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from holdfast.errors import StateError
from trainer_side.ranks.peers import Peers
from trainer_side.state.data_place import DataPlace


def describe_other_data(state: Mapping[str, Any], peers: Peers) -> StateError | None:
    """Return why this rank's data are not those of rank 0; None if they are. Collective.

    `PerRank` values are left out.
    """
    own = {name: value.shared_settings() for name, value in state.items() if isinstance(value, DataPlace)}
    if peers.ranks == 1:
        return None
    first = json.loads(peers.broadcast(json.dumps(own).encode() if peers.rank == 0 else None))
    for name, settings in own.items():
        for setting, value in settings.items():
            expected = first.get(name, settings).get(setting, value)
            if value != expected:
                return StateError(
                    f"{name}: expected {setting} {expected!r}, as on rank 0, got {value!r}: samples would be repeated "
                    "or left out. Make it with the same data set and settings on every rank; where each rank has data "
                    f"of its own, give PerRank({name}, same_ranks=True), with rank=0 and ranks=1"
                )
    return None
