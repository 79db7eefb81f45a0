"""Follows the event log that stager and flusher write (docs/format.md, section 6), as events of the supervisor."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from operator_side.supervise.events import Durable, Event, Joined, Noticed, Silence, Staged

__all__ = ["Follower", "meaning"]

_LINE_BYTES_MAX = 1 << 20
_READ_BYTES = 1 << 20


class Follower:
    """Reads what is appended to a file after now, whole lines only. The file may come later."""

    def __init__(self, path: Path) -> None:
        self._path, self._rest = path, b""
        try:
            self._offset = path.stat().st_size
        except OSError:
            self._offset = 0

    def read(self) -> Iterator[dict[str, Any]]:
        """The new lines that are JSON objects."""
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0  # it was begun anew
                file.seek(self._offset)
                data = file.read(_READ_BYTES)
        except OSError:
            return
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LINE_BYTES_MAX:
            self._rest = b""
        for line in lines:
            try:
                said = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(said, dict):
                yield said


def meaning(said: dict[str, Any]) -> Event | None:
    """What one line means to a supervisor; None: nothing."""
    step, role = said.get("step"), said.get("role")
    if type(step) is int:
        match said.get("event"), role:
            case "staged", "stager":
                return Staged(step)
            case "durable" | "recovered", "flusher":
                return Durable(step)
        return None
    rank, told = said.get("silent_rank"), said.get("told_rank")
    match said.get("event"), role:
        case "rank_silent" | "rank_back" as event, "stager" if type(rank) is int:
            return Silence(rank, over=event == "rank_back")
        case "stager_ready", "stager":
            return Joined()
        case "notice", "stager" if type(told) is int and said.get("kind") == "terminate":
            return Noticed(told)  # a host of which AWS recommends to leave it mostly lives on
    return None
