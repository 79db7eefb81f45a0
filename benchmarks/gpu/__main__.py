"""Measure holdfast on the device of this machine: phases one after the other, each bounded, JSON of each at once.

Exit code 0: every phase has run; 1: one has failed, hung or was left out; 3: there is no device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.measured import write_json
from benchmarks.gpu.packages import ready
from benchmarks.gpu.phase import LACKS_A_PACKAGE, NO_DEVICE

__all__ = ["PHASES", "TimedPhase", "main", "run_phases"]

_ROOT = Path(__file__).resolve().parents[2]
_SECONDS = 500.0  # `make gpu` looks for a Python first, and a command may have 540 there
_SECONDS_MIN = 10.0  # a phase that has less is left out: importing torch takes as long
_DONE = "done"
_TAIL = 2000
_ENOUGH_BYTES = 16 << 30
_ON = ("card", "driver", "torch", "commit")


@dataclass(frozen=True)
class TimedPhase:
    """One phase.

    Attributes:
        name: Of its JSON.
        module: Has `measure`.
        seconds_max: It is killed after so long.
    """

    name: str
    module: str
    seconds_max: float


# The most valuable phases come first: a machine may be taken away at any moment.
PHASES = (
    TimedPhase("facts", "benchmarks.gpu.device_facts", 60),
    TimedPhase("tests", "benchmarks.gpu.device_tests", 120),
    TimedPhase("bandwidths", "benchmarks.gpu.bandwidths", 60),
    TimedPhase("stall", "benchmarks.gpu.device_stall", 110),
    TimedPhase("steps", "benchmarks.gpu.step_times", 110),
    TimedPhase("memory", "benchmarks.gpu.pressure", 40),
    TimedPhase("waits", "benchmarks.gpu.host_waits", 40),
    TimedPhase("resume", "benchmarks.gpu.exact_resume", 90),
)


def run_phases(
    phases: Sequence[TimedPhase], out: Path, *, seconds: float, quick: bool, folder: Path | None = None
) -> int:
    """Run the phases, and write OUT/NAME.json of each; the exit code.

    Args:
        phases: In order. The first one finds out whether there is a device.
        out: Where the JSON goes.
        seconds: For all of them.
        quick: Toy sizes.
        folder: For checkpoints; None: the largest of /dev/shm and the folder for temporary files.
    """
    deadline = time.monotonic() + seconds
    out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **ready(out / "packages")}
    on: dict[str, Any] = {}
    codes = []
    for phase in phases:
        left = min(phase.seconds_max, deadline - time.monotonic())
        path = out / f"{phase.name}.json"
        code = 1
        document: dict[str, Any] = {"phase": phase.name, "status": "left out", "error": "no time was left"}
        if left >= _SECONDS_MIN:
            document, code = _run(phase, path, left, quick=quick, folder=folder, environment=environment)
        if phase is phases[0]:
            on = {name: document.get("figures", {}).get(name) for name in _ON}
        document["on"] = on
        write_json(path, document)
        with (out / "phases.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(document) + "\n")
        print(json.dumps(document), flush=True)
        codes.append(code)
        if code == NO_DEVICE:
            print(document["error"], file=sys.stderr)
            return NO_DEVICE
    return 1 if any(codes) else 0


def _run(
    phase: TimedPhase,
    path: Path,
    seconds: float,
    *,
    quick: bool,
    folder: Path | None,
    environment: dict[str, str],
) -> tuple[dict[str, Any], int]:
    """The figures that the phase has written, with the way it ended; and its exit code."""
    begun = time.monotonic()
    path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="holdfast-gpu-", dir=folder or _roomiest()) as scratch:
        arguments = [
            phase.module,
            phase.name,
            str(path),
            scratch,
            str(seconds),
            *(["--quick"] if quick else []),
        ]
        said = path.with_suffix(".log")
        with said.open("w") as log, _process(arguments, log, environment) as process:
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # also what it has left behind
    tail = said.read_text(encoding="utf-8", errors="replace")[-_TAIL:].strip()
    if code == 0:
        said.unlink()
    document: dict[str, Any] = {"phase": phase.name, "figures": {}}
    if path.exists():
        document = json.loads(path.read_text(encoding="utf-8"))
    document["seconds"] = round(time.monotonic() - begun, 1)
    document["status"] = {
        0: _DONE,
        None: "out of time",
        LACKS_A_PACKAGE: "left out",
        NO_DEVICE: "no device",
    }.get(code, f"failed with exit code {code}")
    if code != 0:
        document["error"] = tail
    return document, 1 if code is None else code


def _process(arguments: list[str], log: Any, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.phase", *arguments],
        cwd=_ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def _roomiest() -> str:
    """Memory, if there is as much of it: a disk would be measured in place of the device."""
    folders = [folder for folder in ("/dev/shm", tempfile.gettempdir()) if os.access(folder, os.W_OK)]
    memory = shutil.disk_usage(folders[0]).free
    return (
        folders[0] if memory > _ENOUGH_BYTES else max(folders, key=lambda path: shutil.disk_usage(path).free)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; the exit code."""
    names = [phase.name for phase in PHASES]
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    parser.add_argument("--out", type=Path, help="Where the JSON goes (default: $OUT, or build/gpu).")
    parser.add_argument(
        "--seconds", type=float, default=_SECONDS, help="For all phases (default: %(default)s)."
    )
    parser.add_argument("--phases", default=",".join(names), help="Only these (default: %(default)s).")
    parser.add_argument("--folder", type=Path, help="Where checkpoints are written (default: /dev/shm).")
    parser.add_argument(
        "--quick", action="store_true", help="Toy sizes: tries it, measures nothing that counts."
    )
    asked = parser.parse_args(arguments)
    wanted = asked.phases.split(",")
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"no such phase: {', '.join(unknown)}; there are {', '.join(names)}")
    out = asked.out or Path(os.environ.get("OUT") or _ROOT / "build" / "gpu")
    # The facts always: no figure goes without them.
    phases = [phase for phase in PHASES if phase.name in ("facts", *wanted)]
    return run_phases(phases, out.resolve(), seconds=asked.seconds, quick=asked.quick, folder=asked.folder)


if __name__ == "__main__":
    sys.exit(main())
