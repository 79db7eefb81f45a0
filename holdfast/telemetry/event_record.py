"""One line of an event log, never above a limit: a list of what each of ten thousand ranks did is cut, and says so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

RECORD_BYTES_MAX = 1 << 16
TOP = ("time", "event", "role", "rank", "step")
_CUTS_MAX = 1000  # each takes away a part of what is largest
_CUTS_NAMED_MAX = 20
_NAME_CHARACTERS_MAX = 200


def record(said: Mapping[str, Any], bytes_max: int = RECORD_BYTES_MAX) -> bytes:
    """The line of one event, with its end. A line that is too long loses the second half of its largest list, mapping
    or text, as often as it takes; the field `cut` names them. Time, event, role, rank and step stay.
    """
    text = _json(said)
    if len(text) < bytes_max:
        return text + b"\n"
    # Through JSON: a copy of plain values, so that the caller's own stay whole.
    own: dict[str, Any] = json.loads(text)
    top = {name: own.pop(name) for name in TOP if name in own}
    cut: list[str] = []
    for _ in range(_CUTS_MAX):
        name = ".".join(_halve(own))[:_NAME_CHARACTERS_MAX]
        if name not in cut and len(cut) < _CUTS_NAMED_MAX:
            cut.append(name)
        text = _json(top | own | {"cut": cut})
        if len(text) < bytes_max:
            break
    return text + b"\n"


def _halve(owner: Any) -> list[str]:
    """Take the second half from what is largest in a mapping or list; where that was, `*` for all of it."""
    path: list[str] = []
    while True:
        keys = list(owner) if isinstance(owner, dict) else list(range(len(owner)))
        sizes = {key: len(_json(key)) + len(_json(owner[key])) for key in keys}
        largest = max(keys, key=lambda key: sizes[key])
        if len(keys) > 1 and 2 * sizes[largest] < sum(sizes.values()):  # many, and each is small
            for key in reversed(keys[len(keys) // 2 :]):
                del owner[key]
            return path or ["*"]
        path.append(str(largest))
        inner = owner[largest]
        if isinstance(inner, str) and len(inner) > 1:
            owner[largest] = inner[: len(inner) // 2]
            return path
        if not isinstance(inner, dict | list) or not inner:
            del owner[largest]
            return path
        owner = inner


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), default=str).encode()
