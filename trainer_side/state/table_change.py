"""In what this rank's state differs from the one that all ranks had agreed on, in a sentence for people."""

from __future__ import annotations

import json
from typing import Any

from holdfast.image.entries import REPLICATED, SPLIT
from trainer_side.state.proposal import Table


def what_changed(before: Table, now: Table) -> str:
    """The first tensor that has changed, and how many others have."""
    old, new = _described(before), _described(now)
    changes = [
        f"tensor {path}: {old[path]} before, {said} now"
        for path, said in new.items()
        if path in old and old[path] != said
    ]
    changes += [f"tensor {path} ({said}) is new" for path, said in new.items() if path not in old]
    changes += [f"tensor {path} ({said}) is gone" for path, said in old.items() if path not in new]
    if not changes:
        if [*old] != [*new]:
            return "its tensors come in another order"
        return "its tensors are as before, and its plan for them was given up; its log says why"
    return changes[0] + (f"; and {len(changes) - 1} more" if len(changes) > 1 else "")


def _described(table: Table) -> dict[str, str]:
    held = {row: table.held.regions[number][1] for row, number in table.held.rows}
    return {str(row[0]): _what(row, held.get(index)) for index, row in enumerate(table.rows)}


def _what(row: list[Any], region: object) -> str:
    _, dtype, shape, owner = row
    kind = {REPLICATED: "replicated", SPLIT: f"split, {region} here"}.get(owner, f"of rank {owner}")
    return f"{dtype} {json.dumps(shape)}, {kind}"
