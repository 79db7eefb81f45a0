"""Runs tests/gpu on the device without the suite's own configuration: a bare machine may have only pytest.

Compiled steps take most of the time, so each backend has a process of its own. These processes wait until the first one
has run the test of the device's free memory.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.gpu.measured import QUICK, Measured, Sizes
from benchmarks.gpu.shared import Shared

__all__ = ["measure"]

_ROOT = Path(__file__).resolve().parents[2]
# They use the late device (tests/late) instead of the real one.
_ON_THE_LATE_DEVICE = ("test_on_the_late_device.py", "test_device_rehearsal.py")
_QUICK = ("tests/gpu/test_rng.py", "tests/gpu/test_scaler.py")
_LOOKS_AT_MEMORY = "test_the_memory_of_a_mirror_stays_with_torch"
_FOLDER = "tests/gpu"
_OF_MEMORY, _COMPILED = "test_staging.py", "test_compiled_steps.py"
_COMPILED_PARTS = ("aot_eager", "cudagraphs", "overhead and not inside", "overhead and inside")
_RESULT = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b")
_LINES_KEPT = 40


def measure(measured: Measured, sizes: Sizes, shared: Shared) -> None:  # noqa: ARG001 - the same for all phases
    if importlib.util.find_spec("pytest") is None:
        raise ModuleNotFoundError("pytest", name="pytest")
    tests = _Tests(measured)
    parts = [[*_QUICK]] if sizes == QUICK else _parts()
    with ThreadPoolExecutor(len(parts)) as threads:
        wrong = [text for text in threads.map(tests.run, range(len(parts)), parts) if text]
    if wrong or not tests.results["PASSED"]:
        raise RuntimeError("\n".join(wrong) or "no test has passed")


def _parts() -> list[list[str]]:
    """Return pytest's arguments for each process."""
    apart = {_OF_MEMORY, _COMPILED, *_ON_THE_LATE_DEVICE}
    others = sorted(path.name for path in (_ROOT / _FOLDER).glob("test_*.py") if path.name not in apart)
    compiled = [[f"{_FOLDER}/{_COMPILED}", "-k", part] for part in _COMPILED_PARTS]
    return [[f"{_FOLDER}/{name}" for name in (_OF_MEMORY, *others)], *compiled]


class _Tests:
    """Processes of pytest, and the tests' results.

    Attributes:
        results: Names of tests, by outcome.
    """

    def __init__(self, measured: Measured) -> None:
        self._measured, self._lock = measured, threading.Lock()
        self._memory_is_seen = measured.folder / "memory-is-seen"
        self._seconds: dict[str, float] = {}
        self.results: dict[str, list[str]] = {"PASSED": [], "FAILED": [], "ERROR": [], "SKIPPED": []}

    def run(self, number: int, what: list[str]) -> str:
        """Run one process; return the end of its output if it failed. Process 0 tests the free memory."""
        last: deque[str] = deque(maxlen=_LINES_KEPT)
        begun = time.monotonic()
        try:
            code = self._lines(what, last, {"GPU_TESTS_BEGIN": str(self._memory_is_seen)} if number else {})
        finally:
            if not number:
                self._memory_is_seen.touch()
        with self._lock:
            self._seconds[" ".join(what[-1:])] = round(time.monotonic() - begun, 1)
            self._measured.put(exit_code=code, seconds_of_parts=self._seconds)
        return f"pytest ended with {code}:\n{''.join(last)}" if code else ""

    def _lines(self, what: list[str], last: deque[str], more: dict[str, str]) -> int:
        with subprocess.Popen(
            [
                *(sys.executable, "-m", "pytest", "-v", "-c", "/dev/null", "--rootdir", str(_ROOT)),
                *("--noconftest", "-p", "benchmarks.gpu.bare_fixtures", "-p", "no:cacheprovider"),
                *("--continue-on-collection-errors", "--tb=short", *what),
            ],
            cwd=_ROOT,
            # Compile in the process: a pool of compilers takes longer to start than these few kernels to compile.
            env={**os.environ, "PYTHONUNBUFFERED": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as pytest:
            assert pytest.stdout is not None
            for line in pytest.stdout:
                last.append(line)
                if found := _RESULT.match(line):
                    self._count(found[1], found[2])
        return pytest.returncode

    def _count(self, test: str, result: str) -> None:
        if _LOOKS_AT_MEMORY in test:
            self._memory_is_seen.touch()
        with self._lock:
            self.results[result].append(test)
            self._measured.put(
                passed=len(self.results["PASSED"]),
                skipped=len(self.results["SKIPPED"]),
                failed=[*self.results["FAILED"], *self.results["ERROR"]],
            )
