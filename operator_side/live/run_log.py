"""Reads the event logs of a growing run again when they have changed, with pauses."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.telemetry.event_reading import logs_in, read_logs
from operator_side.report.facts import RunFacts, gather_facts

_PAUSE_FACTOR = 10  # a long run has a long log: spend a tenth of the time on reading it at most


class RunLog:
    """The facts from a run's logs. `paths`: event logs, or log directories of `holdfast run`; may be missing."""

    def __init__(
        self,
        run: str,
        paths: Sequence[Path],
        *,
        dollars_per_hour: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._paths, self._clock = run, paths, clock
        self._dollars_per_hour = dollars_per_hour
        self._read_stat: list[tuple[str, int, int]] = []
        self._next_read_at = 0.0
        self._facts: RunFacts | None = None

    def read(self) -> RunFacts | None:
        """Return the facts from the logs now; None without logs."""
        began = self._clock()
        if began >= self._next_read_at and (stat := self._stat()) != self._read_stat:
            with contextlib.suppress(ConfigError):  # the log was rotated away at this moment
                log = read_logs(path for path in self._paths if self._files(path))
                facts = gather_facts(self._run, log, dollars_per_hour=self._dollars_per_hour)
                self._facts = facts if log.events else None
                self._read_stat = stat
            self._next_read_at = self._clock() + _PAUSE_FACTOR * (self._clock() - began)
        return self._facts

    def _stat(self) -> list[tuple[str, int, int]]:
        found = []
        for path in self._paths:
            for file in self._files(path):
                with contextlib.suppress(OSError):
                    about = file.stat()
                    found.append((str(file), about.st_size, about.st_mtime_ns))
        return found

    @staticmethod
    def _files(path: Path) -> list[Path]:
        if path.is_dir():
            return logs_in(path)
        return [path] if path.exists() else []
