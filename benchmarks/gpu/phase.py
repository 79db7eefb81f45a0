"""One phase in a process of its own: `python -m benchmarks.gpu.phase MODULE NAME OUT FOLDER SECONDS [--quick]`.

MODULE has `measure(measured, sizes)`. Ends with 0; with NO_DEVICE or LACKS_A_PACKAGE and the reason on stderr; or as
any Python that raises.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from benchmarks.gpu.measured import FULL, QUICK, Measured

__all__ = ["LACKS_A_PACKAGE", "NO_DEVICE"]

NO_DEVICE = 3
LACKS_A_PACKAGE = 4


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("name")
    parser.add_argument("out", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    measured = Measured(asked.out, asked.name, asked.seconds, asked.folder)
    try:
        if reason := _no_device():
            print(reason, file=sys.stderr)
            raise SystemExit(NO_DEVICE)
        importlib.import_module(asked.module).measure(measured, QUICK if asked.quick else FULL)
    except ModuleNotFoundError as error:
        print(f"no package {error.name}", file=sys.stderr)
        raise SystemExit(LACKS_A_PACKAGE) from None


def _no_device() -> str:
    """Why there is no device; empty if there is one."""
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
    _main()
