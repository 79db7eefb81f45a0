"""Controls a worker (worker.py): starts it, gives it phases, ends it with all its children."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

from benchmarks.gpu.worker import NO_DEVICE

__all__ = ["WorkerProcess"]

_ROOT = Path(__file__).resolve().parents[2]
_TAIL = 2000
_LINE_BYTES = 64
_END_SECONDS = 5.0
_MARK = "HOLDFAST_GPU_WORKER"


class WorkerProcess:
    """A process that runs phases in turn.

    Args:
        folder: Parent of the folder that its phases share.
    """

    def __init__(self, environment: dict[str, str], folder: Path, log: Path, *, quick: bool) -> None:
        self._answers, theirs = os.pipe()
        self._log, self._said_before = log, 0
        self._folder = tempfile.mkdtemp(prefix="holdfast-gpu-", dir=folder)
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "benchmarks.gpu.worker", "--answers", str(theirs)),
                    *("--folder", self._folder),
                    *(["--quick"] if quick else []),
                ],
                cwd=_ROOT,
                env={**environment, _MARK: self._mark.partition("=")[2]},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[theirs],
                start_new_session=True,
            )
        os.close(theirs)

    def begin(self, module: str, name: str, out: Path, folder: Path, seconds: float) -> None:
        """Start a phase."""
        self._said_before = self._log.stat().st_size
        phase = {"module": module, "name": name, "out": str(out), "folder": str(folder), "seconds": seconds}
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process is dead, which `answer` reports
            self._process.stdin.write(f"{json.dumps(phase)}\n".encode())
            self._process.stdin.flush()

    def has_answered(self) -> bool:
        """Whether the phase has ended, successfully or not."""
        return bool(select.select([self._answers], [], [], 0)[0]) or self._process.poll() is not None

    def answer(self) -> int | None:
        """Return the exit code of the phase, or of the dead process; None while the phase runs."""
        if select.select([self._answers], [], [], 0)[0] and (line := os.read(self._answers, _LINE_BYTES)):
            return int(line)
        if not self.has_answered():
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        return self._process.returncode or 1

    def said(self) -> str:
        """Return the end of the phase's output."""
        with self._log.open("rb") as log:
            log.seek(self._said_before)
            return log.read().decode(errors="replace")[-_TAIL:].strip()

    def end(self) -> None:
        """Kill the process and its descendants."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        # Flushers and torchrun's ranks have sessions of their own.
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if self._mark.encode() in environ.read_bytes().split(b"\0"):
                    os.kill(int(environ.parent.name), signal.SIGKILL)
        os.close(self._answers)
        shutil.rmtree(self._folder, ignore_errors=True)
        if not self._log.stat().st_size or self._process.returncode == NO_DEVICE:
            self._log.unlink()
