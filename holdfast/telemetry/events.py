"""The event log in JSON lines: one line per event of a checkpoint, for people and programs.

Every line has `time` (Unix seconds), `event`, `role`, and `rank` and `step` if there is one; other fields depend on the
event (docs/format.md lists them). One write appends a whole line, so several processes may share a file. Only a disk
that fills up in the middle of a line cuts it; the next event then starts on its own line. The length of a line is
limited: a list with an entry for each of ten thousand ranks is cut, and the line says so. A full file is rotated
(event_files.py).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast.telemetry.event_files import FILE_BYTES_MAX, hold_append_lock, is_current, rotate

_Listener = Callable[[str, Mapping[str, Any], int | None], None]

RECORD_BYTES_MAX = 1 << 16
TOP_FIELDS = ("time", "event", "role", "rank", "step")
_CUTS_MAX = 1000  # each cut halves the largest item
_CUTS_NAMED_MAX = 20
_NAME_CHARACTERS_MAX = 200

_log = logging.getLogger("holdfast.events")
_RENAMED_MAX = 10
_DISK_TROUBLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE})


class EventLog:
    """Appends events to a file, and mirrors them to `logging` at level DEBUG. Any thread. `path` None: mirror only.
    Raises `ConfigError`: the file cannot be created; a full or broken disk raises nothing.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        role: str,
        rank: int | None = None,
        clock: Callable[[], float] = time.time,
        file_bytes_max: int = FILE_BYTES_MAX,
    ) -> None:
        self._role, self._rank, self._clock = role, rank, clock
        self._path, self._fd = path, -1
        self._file_bytes_max = file_bytes_max
        self._write_lock = threading.Lock()
        self._line_unfinished = False  # the last line that we wrote is unfinished
        self._listeners: list[_Listener] = []
        try:
            self._open()
        except OSError as error:
            if error.errno not in _DISK_TROUBLE:
                raise ConfigError(
                    f"events: {path} cannot be written: {error.strerror}; name another file, or none"
                ) from error
            _log.warning("no events are written until the disk takes them: %s", error)

    def emit(self, event: str, fields: Mapping[str, Any] | None = None, *, step: int | None = None) -> None:
        """Append one event. Never raises, because a full disk must not stop training: each lost line logs a warning."""
        line: dict[str, Any] = {"time": round(self._clock(), 6), "event": event, "role": self._role}
        if self._rank is not None:
            line["rank"] = self._rank
        if step is not None:
            line["step"] = step
        line.update(fields or {})
        data = encode_event(line)
        _log.debug("%s", data[:-1].decode())
        try:
            with self._write_lock:
                self._append(data)
        except OSError as error:
            _log.warning("an event could not be written: %s", error)
        for listener in self._listeners:
            try:
                listener(event, fields or {}, step)
            except Exception:  # noqa: BLE001 - a bug in a listener must not stop the work
                _log.warning("the event %s could not be counted in the metrics", event, exc_info=True)

    def add_listener(self, listener: _Listener) -> None:
        """Call `listener(event, fields, step)` for each event from now on, in the thread that emits it."""
        self._listeners.append(listener)

    def _open(self) -> None:
        if self._fd < 0 and self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _append(self, line: bytes) -> None:
        if self._path is None:
            return
        for _ in range(_RENAMED_MAX):
            self._open()
            with hold_append_lock(self._fd, self._file_bytes_max):
                if is_current(self._fd, self._path):
                    self._write(line)
                    break
            self._close()  # another process has renamed this file
        else:
            raise OSError(f"{self._path}: renamed {_RENAMED_MAX} times while one line was written")
        rotate(self._fd, self._path, bytes_max=self._file_bytes_max)

    def _write(self, line: bytes) -> None:
        if self._line_unfinished:
            line = b"\n" + line
        done = os.write(self._fd, line)
        self._line_unfinished = done < len(line)
        if self._line_unfinished:
            _log.warning("an event was cut after %d of %d bytes, because the disk is full", done, len(line))

    def close(self) -> None:
        """Close the file; later events are only mirrored."""
        self._path = None
        self._close()

    def _close(self) -> None:
        self._line_unfinished = False  # the next line starts another file
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def encode_event(fields: Mapping[str, Any]) -> bytes:
    """Format one event as a line. While it is too long, drop the second half of its largest list, mapping or text; the
    field `cut` names these. Time, event, role, rank and step stay.
    """
    text = _json(fields)
    if len(text) < RECORD_BYTES_MAX:
        return text + b"\n"
    # Copy through JSON, so that the caller's values stay unchanged.
    own: dict[str, Any] = json.loads(text)
    top = {name: own.pop(name) for name in TOP_FIELDS if name in own}
    cut: list[str] = []
    for _ in range(_CUTS_MAX):
        name = ".".join(_halve(own))[:_NAME_CHARACTERS_MAX]
        if name not in cut and len(cut) < _CUTS_NAMED_MAX:
            cut.append(name)
        text = _json(top | own | {"cut": cut})
        if len(text) < RECORD_BYTES_MAX:
            break
    return text + b"\n"


def _halve(owner: Any) -> list[str]:
    """Remove the second half of the largest item in a mapping or list; return its path, `*` for `owner` itself."""
    path: list[str] = []
    while True:
        keys = list(owner) if isinstance(owner, dict) else list(range(len(owner)))
        sizes = {key: len(_json(key)) + len(_json(owner[key])) for key in keys}
        largest = max(keys, key=lambda key: sizes[key])
        if len(keys) > 1 and 2 * sizes[largest] < sum(sizes.values()):  # many small items
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
