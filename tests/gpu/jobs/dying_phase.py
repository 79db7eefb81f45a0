"""Phases that die in different ways, between two that do not: `python -m tests.gpu.jobs.dying_phase OUT`.

As a phase's module it does what the phase's name says.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from benchmarks.gpu.__main__ import TimedPhase, run_phases
from benchmarks.gpu.measured import Measured, Sizes

_HERE = "tests.gpu.jobs.dying_phase"
_HANGS_SECONDS = 30


def measure(measured: Measured, sizes: Sizes) -> None:
    """What a phase is asked for."""
    measured.put(before=1)
    match measured.phase:
        case "raises":
            raise RuntimeError("planted")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hangs":
            time.sleep(600)
        case "lacks":
            raise ModuleNotFoundError("no_such_package", name="no_such_package")


def main() -> int:
    """Run them; the exit code."""
    phases = [
        TimedPhase("facts", "benchmarks.gpu.device_facts", 120),
        *(TimedPhase(name, _HERE, 120) for name in ("raises", "killed")),
        TimedPhase("hangs", _HERE, _HANGS_SECONDS),
        *(TimedPhase(name, _HERE, 120) for name in ("lacks", "last")),
        TimedPhase("late", _HERE, 1),  # less than a phase needs
    ]
    return run_phases(phases, Path(sys.argv[1]), seconds=540, quick=True)


if __name__ == "__main__":
    sys.exit(main())
