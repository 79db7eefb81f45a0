"""Measure holdfast on this machine's device, in phases with a time limit and a JSON file each.

Exit code 0: every phase has run; 1: a phase has failed, hung or was left out; 3: there is no device.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.measured import write_json
from benchmarks.gpu.packages import ready
from benchmarks.gpu.phases import PHASES, SECONDS, TimedPhase, asked_for, groups, seconds_of
from benchmarks.gpu.report import write_report
from benchmarks.gpu.worker import LACKS_A_PACKAGE, NO_DEVICE
from benchmarks.gpu.worker_process import WorkerProcess

__all__ = ["main", "run_phases"]

_ROOT = Path(__file__).resolve().parents[2]
_SECONDS_MIN = 3.0  # a phase with less time is left out
_START_SECONDS = 5.0  # extra time for a new process, which imports torch
# A phase may overrun this much, at the cost of the last phases: killing it would lose the shared locked memory.
_LATE_SECONDS = 5.0
_LOOK_SECONDS = 0.05
_ENOUGH_BYTES = 16 << 30
_ON = ("card", "driver", "torch", "commit")
_STATUS = {0: "done", None: "out of time", LACKS_A_PACKAGE: "left out", NO_DEVICE: "no device"}


def run_phases(
    phases: Sequence[TimedPhase], out: Path, *, seconds: float, quick: bool, folder: Path | None = None
) -> int:
    """Run the phases, write OUT/NAME.json of each, and return the exit code.

    Args:
        phases: In order. The first one checks for a device.
        out: Folder of the JSON files.
        seconds: For all phases; if it differs from the sum of theirs, each gets its proportion.
        quick: Use toy sizes.
        folder: For checkpoints; None: /dev/shm or the folder for temporary files, whichever has more room.
    """
    out.mkdir(parents=True, exist_ok=True)
    run = _Run(out, quick, folder, {**os.environ, **ready(out / "packages")})
    share = seconds / seconds_of(phases)
    ends = time.monotonic()
    last = ends + seconds
    try:
        for group in groups(phases):
            ends += share * seconds_of(group)
            run.group(group, ends, min(last, ends + share * _LATE_SECONDS))
            if run.codes[-1] == NO_DEVICE:
                return NO_DEVICE
    finally:
        run.close()
    write_report(out)
    return 1 if any(run.codes) else 0


class _Run:
    """The processes of a run, and the results of its phases."""

    def __init__(self, out: Path, quick: bool, folder: Path | None, environment: dict[str, str]) -> None:
        self._out, self._quick, self._environment = out, quick, environment
        self._folder = folder or Path(_roomiest())
        self._shared: WorkerProcess | None = None
        self._on: dict[str, Any] = {}
        self.codes: list[int] = []

    def group(self, phases: Sequence[TimedPhase], ends: float, killed: float) -> None:
        """Run some phases at the same time. They are told to end by `ends`, and killed at `killed`."""
        begun, left = time.monotonic(), ends - time.monotonic()
        running: dict[TimedPhase, tuple[WorkerProcess, Path]] = {}
        for phase in phases:
            starts = phase.alone or self._shared is None
            if left < _SECONDS_MIN + (_START_SECONDS if starts else 0):
                error = f"{max(0, left):.0f} s were left"
                self._ended(phase, {"phase": phase.name, "status": "left out", "error": error}, 1)
                continue
            worker = self._worker(phase)
            scratch = Path(tempfile.mkdtemp(prefix="holdfast-gpu-", dir=self._folder))
            path = self._out / f"{phase.name}.json"
            path.unlink(missing_ok=True)
            worker.begin(phase.module, phase.name, path, scratch, left)
            running[phase] = worker, scratch
        while running:
            for phase, (worker, scratch) in list(running.items()):
                if worker.has_answered() or time.monotonic() > killed:
                    self._end(phase, worker, time.monotonic() - begun)
                    shutil.rmtree(scratch, ignore_errors=True)
                    del running[phase]
            time.sleep(_LOOK_SECONDS)

    def _worker(self, phase: TimedPhase) -> WorkerProcess:
        """Return the process for a phase."""
        if phase.alone:
            return WorkerProcess(
                self._environment, self._folder, self._out / f"{phase.name}.log", quick=self._quick
            )
        if self._shared is None:
            self._shared = WorkerProcess(
                self._environment, self._folder, self._out / "shared.log", quick=self._quick
            )
        return self._shared

    def _end(self, phase: TimedPhase, worker: WorkerProcess, seconds: float) -> None:
        code = worker.answer()
        said = worker.said()
        if phase.alone or code not in (0, LACKS_A_PACKAGE):
            worker.end()
            self._shared = self._shared if phase.alone else None
        path = self._out / f"{phase.name}.json"
        document: dict[str, Any] = {"phase": phase.name, "figures": {}}
        if path.exists():
            document = json.loads(path.read_text(encoding="utf-8"))
        document["seconds"] = round(seconds, 1)
        document["status"] = _STATUS.get(code, f"failed with exit code {code}")
        if code != 0:
            document["error"] = said
        self._ended(phase, document, 1 if code is None else code)

    def _ended(self, phase: TimedPhase, document: dict[str, Any], code: int) -> None:
        if not self.codes:
            self._on = {name: document.get("figures", {}).get(name) for name in _ON}
        document["on"] = self._on
        write_json(self._out / f"{phase.name}.json", document)
        with (self._out / "phases.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(document) + "\n")
        print(json.dumps(document), flush=True)
        self.codes.append(code)
        if code == NO_DEVICE:
            print(document["error"], file=sys.stderr)

    def close(self) -> None:
        """End the shared process."""
        if self._shared is not None:
            self._shared.end()


def _roomiest() -> str:
    """Return the folder for checkpoints: in memory if it has enough room, as a disk would distort the figures."""
    folders = [folder for folder in ("/dev/shm", tempfile.gettempdir()) if os.access(folder, os.W_OK)]
    memory = shutil.disk_usage(folders[0]).free
    return (
        folders[0] if memory > _ENOUGH_BYTES else max(folders, key=lambda path: shutil.disk_usage(path).free)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    every = ",".join(phase.name for phase in PHASES)
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    parser.add_argument("--out", type=Path, help="Where the JSON goes (default: $OUT, or build/gpu).")
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"For all phases (default: {SECONDS:.0f} for all of them, and their share for some).",
    )
    parser.add_argument(
        "--phases", default=every, help="Only these; peers: all of the peers (default: %(default)s)."
    )
    parser.add_argument("--folder", type=Path, help="Where checkpoints are written (default: /dev/shm).")
    parser.add_argument(
        "--quick", action="store_true", help="Toy sizes: tries it, measures nothing that counts."
    )
    asked = parser.parse_args(arguments)
    try:
        phases = asked_for(asked.phases.split(","))
    except ValueError as error:
        parser.error(str(error))
    out = asked.out or Path(os.environ.get("OUT") or _ROOT / "build" / "gpu")
    seconds = asked.seconds or seconds_of(phases)
    return run_phases(phases, out.resolve(), seconds=seconds, quick=asked.quick, folder=asked.folder)


if __name__ == "__main__":
    sys.exit(main())
