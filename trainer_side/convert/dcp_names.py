"""The names of numbered parameters, in a folder of torch.distributed.checkpoint: a file that DCP ignores.

holdfast-names.json    {"only": null, "names": {"optimizer": [["model/a.weight", …]]}}    as in data.pkl
"""

from __future__ import annotations

import json
from pathlib import Path

from holdfast.errors import DamageError
from holdfast.parse_cost import PLAIN_FACTOR, check_cost, json_cost
from trainer_side.state.position_names import Positions, from_rows, to_rows

_FILE = "holdfast-names.json"
_BYTES_MAX = 1 << 28


def write_names(folder: Path, names: Positions, only: str | None) -> None:
    """Write the names into a folder, if there are any. Raises OSError."""
    if names:
        (folder / _FILE).write_text(json.dumps({"only": only, "names": to_rows(names)}), encoding="ascii")


def read_names(folder: Path) -> tuple[str | None, Positions]:
    """Read the names in a folder; none if only DCP wrote it. Raises OSError; DamageError: the file is damaged.

    Returns also the name of the part of the state that is in the folder; None: the whole state.
    """
    path = folder / _FILE
    if not path.is_file():
        return None, {}
    try:
        if path.stat().st_size > _BYTES_MAX:
            raise ValueError(f"{path.stat().st_size} bytes, expected at most {_BYTES_MAX}")
        raw = path.read_bytes()
        check_cost(json_cost(raw), len(raw), PLAIN_FACTOR)
        document = json.loads(raw)
        only = document["only"]
        return None if only is None else str(only), from_rows(document["names"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamageError(f"{path}: the names of parameters cannot be read: {error!r:.200}") from error
