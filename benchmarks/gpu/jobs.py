"""Compares trainings that are killed by SIGKILL and resume with uninterrupted ones: every bit of each rank's state.

    alone   one rank, a tier in shared memory; the killed process is started again
    ddp     two ranks under torchrun, a standing stager; torchrun restarts the killed ranks
    fsdp2   as ddp, with a rank for each device, two at most, and NCCL

All run at the same time. NCCL refuses two ranks on one card, so DDP uses gloo there. Where NCCL does not work at all,
FSDP2 uses gloo, too, and the figures say so. The output of each launch is in OUT/jobs-KIND-NAME.log.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.measured import QUICK, Measured, Sizes
from benchmarks.gpu.shared import Shared
from benchmarks.gpu.standing import standing

__all__ = ["KINDS", "measure"]

_ROOT = Path(__file__).resolve().parents[2]
KINDS = ("alone", "ddp", "fsdp2")
_STEPS, _KILLED_AT = 14, 8
_RANKS = 2
_END_SECONDS = 2.0
_AGAIN_SECONDS_MIN = 15.0
_RECONNECT_SECONDS = "3"
_TAIL = 1500


def measure(measured: Measured, sizes: Sizes, shared: Shared) -> None:  # noqa: ARG001 - the same for all phases
    if sizes != QUICK:
        # The stager admits the restarted job once it gives up the killed ranks, here earlier than the usual 10 s.
        os.environ["HOLDFAST_RECONNECT_SECONDS_MAX"] = _RECONNECT_SECONDS
    devices = torch.cuda.device_count()
    jobs = {
        "alone": _Job(measured, "alone", 1, "gloo", quick=sizes == QUICK),
        "ddp": _Job(measured, "ddp", _RANKS, "nccl" if devices >= _RANKS else "gloo", quick=sizes == QUICK),
        "fsdp2": _Job(measured, "fsdp2", min(_RANKS, devices), "nccl", quick=sizes == QUICK),
    }
    found: dict[str, Any] = {}
    with ThreadPoolExecutor(
        2 * len(jobs)
    ) as threads:  # one thread for the uninterrupted run, one for the killed
        running: dict[str, Future[dict[str, Any]]] = {
            kind: threads.submit(job.killed_and_resumed, threads) for kind, job in jobs.items()
        }
        for kind, job in running.items():
            try:
                found[kind] = job.result()
            except Exception as error:  # noqa: BLE001 - the other jobs are looked at all the same
                found[kind] = {"error": f"{type(error).__name__}: {error}", **jobs[kind].told}
            measured.put(jobs=found)
    if wrong := [kind for kind, one in found.items() if not one.get("same_bits")]:
        raise RuntimeError(f"not the same: {', '.join(wrong)}")


class _Job:
    """One kind of job.

    Attributes:
        told: Seconds of each launch by name, and NCCL's error if it failed.
    """

    def __init__(self, measured: Measured, kind: str, ranks: int, backend: str, *, quick: bool) -> None:
        self._measured, self._kind, self._ranks, self._backend = measured, kind, ranks, backend
        self._quick = quick
        self.told: dict[str, Any] = {"seconds": {}}

    def killed_and_resumed(self, threads: ThreadPoolExecutor) -> dict[str, Any]:
        """Run both trainings, and return the comparison."""
        try:
            through, resumed = self._both(threads)
        except RuntimeError as error:
            if self._backend != "nccl" or self._measured.seconds_left() < _AGAIN_SECONDS_MIN:
                raise
            self._backend, self.told = "gloo", {"seconds": {}, "nccl_said": str(error)}
            through, resumed = self._both(threads)
        first = {one["first_step"] for one in resumed}
        differing = {
            f"{part} of rank {rank}"
            for rank, (one, other) in enumerate(zip(through, resumed, strict=True))
            for part, digest in one["digests"].items()
            if other["digests"][part] != digest
        }
        return {
            "ranks": self._ranks,
            "backend": self._backend,
            **self.told,
            "killed_at": _KILLED_AT,
            "resumed_first_step": sorted(first),
            "differing": sorted(differing),
            "same_bits": not differing and 0 not in first,
        }

    def _both(self, threads: ThreadPoolExecutor) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the ranks' results of the uninterrupted run, and of the run that was killed and resumed."""
        through = threads.submit(self._launch, "through", "through", {})
        try:
            if self._kind == "alone":
                self._launch("killed", "killed", {}, killed_at=_KILLED_AT)
                resumed = self._launch("killed", "resumed", {})
            else:
                with standing(self._measured.folder / f"{self._kind}-stager-{self._backend}") as joining:
                    resumed = self._launch("killed", "killed", joining, killed_at=_KILLED_AT)
            return through.result(), resumed
        finally:
            through.exception()  # wait for the uninterrupted run in any case

    def _launch(
        self, store: str, name: str, joining: dict[str, str], *, killed_at: int = 0
    ) -> list[dict[str, Any]]:
        """Run the job; return its ranks' results, none if a rank is killed and not restarted."""
        folder = self._measured.folder / f"{self._kind}-{store}-{self._backend}"
        (folder / "tier").mkdir(parents=True, exist_ok=True)
        left = self._measured.seconds_left() - _END_SECONDS
        rank = [
            *("-m", "benchmarks.gpu.job_rank", self._kind, self._backend, str(folder / "result")),
            *(str(_STEPS), str(killed_at), str(time.monotonic() + left)),
            *(["--quick"] if self._quick else []),
        ]
        tier = {"HOLDFAST_STORE": str(folder / "store"), "HOLDFAST_TIERS": f"memory:{folder / 'tier'}"}
        environment = {
            **os.environ,
            **(joining or tier),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "HOLDFAST_ON_FULL": "wait",
            "NCCL_DEBUG": "WARN",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        torchrun = [
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self._ranks)),
            *("--max-restarts", "1" if killed_at else "0"),
        ]
        is_alone = self._kind == "alone"
        log = self._measured.beside(f"{self._kind}-{name}.log")
        begun = time.monotonic()
        try:
            code = _run([*([] if is_alone else torchrun), *rank], environment, log, left)
        finally:
            self.told["seconds"][name] = round(time.monotonic() - begun, 1)
        said = log.read_text(encoding="utf-8", errors="replace")[-_TAIL:]
        if code is None:
            raise RuntimeError(f"{name} did not end in {left:.0f} s:\n{said}")
        if killed_at and is_alone:
            if code != -signal.SIGKILL:
                raise RuntimeError(f"{name} was not killed: {code}\n{said}")
            return []
        results = sorted(folder.glob("result-*.json"))
        if code or len(results) != self._ranks:
            raise RuntimeError(f"{name} ended with {code}:\n{said}")
        return [json.loads(path.read_text(encoding="utf-8")) for path in results]


def _run(command: list[str], environment: dict[str, str], log: Path, seconds: float) -> int | None:
    """Run Python with this command; return the exit code, None after a timeout."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    with log.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=_ROOT,
            env=kept,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    try:
        return process.wait(max(1.0, seconds))
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None
