"""tests/gpu on the device, without what the suite's own configuration needs: a bare machine may have pytest alone."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import deque
from pathlib import Path

from benchmarks.gpu.measured import QUICK, Measured, Sizes
from benchmarks.gpu.shared import Shared

__all__ = ["measure"]

_ROOT = Path(__file__).resolve().parents[2]
# They bring a device that is not there, beside one that is.
_ON_THE_LATE_DEVICE = ("test_on_the_late_device.py", "test_device_rehearsal.py")
_QUICK = ("tests/gpu/test_rng.py", "tests/gpu/test_scaler.py")
_RESULT = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b")
_LINES_KEPT = 40


def measure(measured: Measured, sizes: Sizes, shared: Shared) -> None:  # noqa: ARG001 - the same for all phases
    if importlib.util.find_spec("pytest") is None:
        raise ModuleNotFoundError("pytest", name="pytest")
    command = [
        *(sys.executable, "-m", "pytest", "-v", "-c", "/dev/null", "--rootdir", str(_ROOT), "--noconftest"),
        *("-p", "no:cacheprovider", "--continue-on-collection-errors", "--tb=short"),
        *(_QUICK if sizes == QUICK else ("tests/gpu",)),
        *(f"--ignore=tests/gpu/{name}" for name in _ON_THE_LATE_DEVICE),
    ]
    results: dict[str, list[str]] = {"PASSED": [], "FAILED": [], "ERROR": [], "SKIPPED": []}
    last: deque[str] = deque(maxlen=_LINES_KEPT)
    with subprocess.Popen(
        command,
        cwd=_ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as pytest:
        assert pytest.stdout is not None
        for line in pytest.stdout:
            last.append(line)
            if found := _RESULT.match(line):
                results[found[2]].append(found[1])
                measured.put(
                    passed=len(results["PASSED"]),
                    skipped=len(results["SKIPPED"]),
                    failed=[*results["FAILED"], *results["ERROR"]],
                )
    measured.put(exit_code=pytest.returncode)
    if pytest.returncode or not results["PASSED"]:
        raise RuntimeError(f"pytest ended with {pytest.returncode}:\n{''.join(last)}")
