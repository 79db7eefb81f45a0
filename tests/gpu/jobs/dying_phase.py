"""Phases that die in different ways, between some that survive: `python -m tests.gpu.jobs.dying_phase OUT`.

As the module of a phase, this file does as the phase's name says.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.__main__ import run_phases
from benchmarks.gpu.measured import Measured, Sizes
from benchmarks.gpu.phases import TimedPhase, seconds_of
from benchmarks.gpu.shared import Shared

_HERE = "tests.gpu.jobs.dying_phase"
_LONG_SECONDS = 600


def measure(measured: Measured, sizes: Sizes, shared: Shared) -> None:
    """Run the phase."""
    measured.put(pid=os.getpid())
    match measured.phase.partition("-")[0]:
        case "raises":
            raise RuntimeError("planted")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hangs":
            # In a session of its own, as a flusher.
            left = subprocess.Popen(["sleep", str(_LONG_SECONDS)], start_new_session=True)
            measured.put(left=left.pid)
            time.sleep(_LONG_SECONDS)
        case "lacks":
            raise ModuleNotFoundError("no_such_package", name="no_such_package")


def main() -> int:
    """Run the phases; return the exit code."""
    phases = [
        TimedPhase("facts", "benchmarks.gpu.device_facts", 60),
        TimedPhase("hangs", _HERE, 0.001),  # the time left over by the previous phase counts too
        TimedPhase("late", _HERE, 0.001),
        *(TimedPhase(name, _HERE, 120) for name in ("first", "raises", "second", "killed", "third")),
        *(TimedPhase(name, _HERE, 120) for name in ("lacks", "fourth")),
        TimedPhase("killed-alone", _HERE, 120, alone=True, together="three"),
        TimedPhase("beside", _HERE, 120, alone=True, together="three"),
        TimedPhase("fifth", _HERE, 120, together="three"),
    ]
    return run_phases(phases, Path(sys.argv[1]), seconds=seconds_of(phases), quick=True)


if __name__ == "__main__":
    sys.exit(main())
