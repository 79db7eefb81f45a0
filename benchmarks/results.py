"""Reads and writes the JSON of each experiment, the source of all figures in the documentation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

__all__ = ["COMMITTED", "RESULTS", "compact", "read", "write"]

RESULTS = Path(__file__).parent / "results"
COMMITTED = Path(__file__).parents[1] / "docs" / "figures" / "data"
_DIGITS = 5


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(of) for key, of in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(of) for of in value]
    if isinstance(value, float):
        return round(value, _DIGITS)
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if value is None or isinstance(value, str | int):
        return value
    raise TypeError(f"{type(value).__name__} is not for JSON")


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write `document` as JSON, one line for each innermost object."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(compact(_plain(document)) + "\n", encoding="utf-8")


def compact(value: Any, indent: int = 0) -> str:
    """Return JSON with short values on one line: small in the repository, and readable in a diff."""
    flat = json.dumps(value, ensure_ascii=False)
    if len(flat) + indent <= 110 or not isinstance(value, dict | list):
        return flat
    inner, outer = " " * (indent + 1), " " * indent
    if isinstance(value, dict):
        parts = [
            f"{inner}{json.dumps(key, ensure_ascii=False)}: {compact(of, indent + 1)}"
            for key, of in value.items()
        ]
        return "{\n" + ",\n".join(parts) + f"\n{outer}}}"
    if not any(isinstance(of, dict | list) for of in value):
        return flat
    return "[\n" + ",\n".join(f"{inner}{compact(of, indent + 1)}" for of in value) + f"\n{outer}]"


def read(name: str, folder: Path = COMMITTED) -> dict[str, Any] | None:
    """Return the document of one experiment, None if it was not measured."""
    path = folder / f"{name}.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None
