"""The JSON-lines event log: one line per thing that happened to a checkpoint, for people and programs.

Every line has `time` (Unix seconds), `event`, `role`, and `rank` and `step` where there is one; the rest is the event's
own (docs/format.md lists them). Lines are appended whole, by one write each, so several processes may share a file.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["EventLog"]

_log = logging.getLogger("holdfast.events")


class EventLog:
    """Appends events to a file, and mirrors them to `logging` at level DEBUG. May be used from any thread.

    Args:
        path: The file, or None to only mirror.
        role: `trainer`, `stager`, `flusher` or `tool`.
        rank: Rank within the role, if it has ranks.
        clock: Gives Unix seconds.
    """

    def __init__(
        self, path: Path | None, *, role: str, rank: int | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._role, self._rank, self._clock = role, rank, clock
        self._fd = -1
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def emit(self, event: str, fields: Mapping[str, Any] | None = None, *, step: int | None = None) -> None:
        """Append one event. Never raises: a full disk must not stop training; it is logged once per line instead."""
        line: dict[str, Any] = {"time": round(self._clock(), 6), "event": event, "role": self._role}
        if self._rank is not None:
            line["rank"] = self._rank
        if step is not None:
            line["step"] = step
        line.update(fields or {})
        text = json.dumps(line, separators=(",", ":"), default=str)
        _log.debug("%s", text)
        if self._fd >= 0:
            try:
                os.write(self._fd, text.encode() + b"\n")
            except OSError as error:
                _log.warning("event not written: %s", error)

    def close(self) -> None:
        """Close the file; later events are only mirrored."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
