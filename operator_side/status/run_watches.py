"""The runs that `holdfast status` shows: the named one, or all runs of this machine."""

from __future__ import annotations

from pathlib import Path

from holdfast.config import FlusherConfig
from holdfast.errors import StoreMissing
from holdfast.ring.directory import runtime_directory
from operator_side.status.run_status import RunStatus
from operator_side.status.run_watch import RunWatch, runs_in


class RunWatches:
    """Looks at all of them repeatedly. A run that has ended stays.

    Attributes:
        keys: Name of a run, as its status has it → its run key.
    """

    def __init__(self, run: str | None, runtime_dir: Path | None, dollars_per_hour: float | None) -> None:
        # Read the setting as the roles do; the class wants a store, which does not matter here if none is named.
        self._base = FlusherConfig.from_sources(store=run or "none", runtime_dir=runtime_dir).runtime_dir
        self._dollars_per_hour = dollars_per_hour
        self._run = run
        self.keys: dict[str, str] = {}
        self._watches: dict[Path, RunWatch] = {}

    def look(self) -> list[RunStatus]:
        self._find()
        if not self._watches:
            raise StoreMissing(
                f"{self._run or self._base}: there is no such run on this machine; name the URL of a run, or start the "
                "command on the machine of its stager (`ssh HOST holdfast status`)"
            )
        found = [watch.look() for watch in self._watches.values()]
        self.keys = {one.run: directory.name for one, directory in zip(found, self._watches, strict=True)}
        return sorted(found, key=lambda one: one.newest_unix, reverse=True)

    def _find(self) -> None:
        place = self._base if self._run is None else Path(self._run)
        for directory in runs_in(place.absolute()):
            if directory not in self._watches:
                self._watches[directory] = RunWatch(directory, dollars_per_hour=self._dollars_per_hour)
        if not self._watches and self._run is not None:
            directory = runtime_directory(self._run, self._base)
            self._watches[directory] = RunWatch(directory, self._run, dollars_per_hour=self._dollars_per_hour)
