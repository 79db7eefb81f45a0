"""Reads event logs line by line: any bytes in, checked events out. Unreadable lines are only counted.

Logs of several machines are merged by the times in them, although each machine has its own clock.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from holdfast.errors import ConfigError
from holdfast.telemetry.event_files import numbered_files, open_all
from holdfast.telemetry.events import TOP_FIELDS

LINE_BYTES_MAX = 1 << 24  # enough for the times of ten thousand ranks
TIME_MAX = 1e11  # three thousand years
_NUMBER_MAX = 1e15
_WHOLE_MAX = 2**62
_TEXT_CHARACTERS_MAX = 1000
_STATUS_LOGS = ("status.jsonl", "events.jsonl")
# `durable` of a trainer, most of a long run's log, repeats `save` and `staged` apart from these fields.
_KEPT_OF_DURABLE = frozenset({"durable_seconds", "saved_at_unix"})


class LoggedEvent(NamedTuple):
    """One line. `fields`: the event's own fields, with invalid numbers removed and long texts cut."""

    time: float
    event: str
    role: str
    rank: int | None
    step: int | None
    fields: Mapping[str, Any]


@dataclass
class Log:
    """All lines of all files."""

    events: list[LoggedEvent] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    unreadable: int = 0  # lines that are not an event, such as one that a full disk has cut
    # files whose last line is unfinished: a process was still writing it, or was killed
    unfinished: list[str] = field(default_factory=list)


def read_logs(paths: Iterable[Path]) -> Log:
    """Read event logs with their numbered files; of a directory status.jsonl and events.jsonl. Raises `ConfigError`."""
    log = Log()
    seen_inodes: set[tuple[int, int]] = set()
    for path in paths:
        for file in _log_files(path):
            try:
                for one, lines in open_all(file):
                    about = os.fstat(lines.fileno())
                    key = about.st_dev, about.st_ino
                    if key not in seen_inodes:  # a path such as `events.jsonl*` names numbered files again
                        seen_inodes.add(key)
                        _read_lines(lines, one, log, is_last=one == file)
            except OSError as error:
                raise ConfigError(
                    f"--events {file}: cannot be read: {error.strerror}; name an event log (setting `events`), or the "
                    "log directory of `holdfast run`"
                ) from error
            log.files.append(str(file))
    log.events.sort(key=lambda event: event.time)
    return log


def logs_in(directory: Path) -> list[Path]:
    """Return the event logs of `holdfast run` in its log directory."""
    return [path for name in _STATUS_LOGS if (path := directory / name).exists() or numbered_files(path)]


def _log_files(path: Path) -> list[Path]:
    try:
        if not path.is_dir():
            return [path]
        found = logs_in(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--events {path}: cannot be used: {error}") from error
    if not found:
        raise ConfigError(
            f"--events {path}: the directory has neither status.jsonl nor events.jsonl; name the file itself"
        )
    return found


def _read_lines(lines: IO[bytes], path: Path, log: Log, *, is_last: bool) -> None:
    while line := lines.readline(LINE_BYTES_MAX):
        is_complete = line.endswith(b"\n")
        if not is_complete and len(line) == LINE_BYTES_MAX:  # too long: skip the rest of the line
            while (rest := lines.readline(LINE_BYTES_MAX)) and not rest.endswith(b"\n"):
                pass
            log.unreadable += 1
            continue
        if not line.strip():
            continue
        event = parse_line(line)
        if event is not None:
            log.events.append(event)
        else:
            log.unreadable += 1
        if not is_complete and is_last:
            log.unfinished.append(str(path))


def parse_line(line: bytes) -> LoggedEvent | None:
    """Parse one line; None if it is not an event."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    time, event = as_number(document.get("time"), TIME_MAX), document.get("event")
    if time is None or not isinstance(event, str) or not event:
        return None
    role, rank = as_text(document.get("role")), as_int(document.get("rank"))
    step = as_int(document.get("step"), least=-1)
    kept = _KEPT_OF_DURABLE if role == "trainer" and event == "durable" else None
    fields = {
        name: good
        for name, value in document.items()
        if (name not in TOP_FIELDS or (name == "rank" and role == "supervisor"))
        and (kept is None or name in kept)
        and (good := _sanitize(value)) is not None
    }
    if role == "supervisor" and step is not None:
        fields["step"] = step  # -1: a new run
    return LoggedEvent(time, as_text(event), role, rank, None if step == -1 else step, fields)


def _sanitize(value: Any) -> Any:
    if isinstance(value, bool | dict | list):
        return value  # code that uses a dict or list checks its contents
    if isinstance(value, str):
        return as_text(value)
    if isinstance(value, int):
        return as_int(value, least=-_WHOLE_MAX)
    return as_number(value, least=-_NUMBER_MAX)


def as_number(value: Any, most: float = _NUMBER_MAX, *, least: float = 0.0) -> float | None:
    """Return `value` if it is a finite number within bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        return None  # NaN ends here, too
    return float(value) if math.isfinite(value) else None


def as_int(value: Any, *, least: int = 0) -> int | None:
    """Return `value` if it is an integer within bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _WHOLE_MAX:
        return None
    return value


def as_text(value: Any) -> str:
    """Return `value` if it is a text, cut if it is long; otherwise an empty text."""
    return value[:_TEXT_CHARACTERS_MAX] if isinstance(value, str) else ""
