"""The process that runs phases: `python -m benchmarks.gpu.worker`. Each line on stdin starts a phase.

    __main__ ══ {"module", "name", "out", "folder", "seconds"} ══► measure(measured, sizes, shared)
             ◄══ the phase's exit code, a line on `--answers` ══

Consecutive phases in one process share what is slow to make: the training, and locked memory. The process ends after a
failed phase, so that no figure comes from a device in an unknown state.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

from benchmarks.gpu.measured import FULL, QUICK, Measured, Sizes

__all__ = ["LACKS_A_PACKAGE", "NO_DEVICE"]

NO_DEVICE = 3
LACKS_A_PACKAGE = 4
_GOES_ON = (0, LACKS_A_PACKAGE)


def _main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int, required=True, help="the file descriptor for exit codes")
    parser.add_argument("--folder", type=Path, required=True, help="for what phases share")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    sizes = QUICK if asked.quick else FULL
    if reason := _no_device():
        print(reason, file=sys.stderr)
        return NO_DEVICE
    from benchmarks.gpu.shared import Shared

    shared = Shared(sizes, asked.folder)
    try:
        for line in sys.stdin:
            code = _run(json.loads(line), sizes, shared)
            sys.stderr.flush()
            os.write(asked.answers, f"{code}\n".encode())
            if code not in _GOES_ON:
                break
    finally:
        shared.close()
    return 0


def _run(phase: dict[str, str | float], sizes: Sizes, shared: object) -> int:
    measured = Measured(
        Path(str(phase["out"])), str(phase["name"]), float(phase["seconds"]), Path(str(phase["folder"]))
    )
    try:
        importlib.import_module(str(phase["module"])).measure(measured, sizes, shared)
    except ModuleNotFoundError as error:
        print(f"no package {error.name}", file=sys.stderr)
        return LACKS_A_PACKAGE
    except Exception:  # noqa: BLE001 - whatever it is, it is this phase's, and the next ones get another process
        traceback.print_exc()
        return 1
    return 0


def _no_device() -> str:
    """Return why there is no device, or ""."""
    try:
        import torch
    except ImportError as error:
        return f"no device can be used: torch cannot be imported ({error})"
    if torch.cuda.is_available():
        return ""
    build = torch.version.cuda or torch.version.hip
    if build is None:
        return f"no device can be used: torch {torch.__version__} is built for the CPU alone"
    return f"no device: torch {torch.__version__} is built for {build}, and finds no device and driver"


if __name__ == "__main__":
    # Not sys.exit: a peer's thread or process may never end, and all figures are written.
    ended = _main()
    sys.stderr.flush()
    os._exit(ended)
