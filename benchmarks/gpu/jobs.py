"""Trainings that are killed by SIGKILL and go on, against ones that went through: every bit of each rank's state.

    alone   one rank, a tier in shared memory
    ddp     two ranks under torchrun, a standing stager
    fsdp2   a rank for each device, two at most, under torchrun with NCCL, a standing stager

All that can run at the same time does. NCCL refuses two ranks on one card, so there DDP has gloo; what NCCL says of two
ranks is in the figures. Where NCCL does not work at all, FSDP2 has gloo, too, and the figures say so.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
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
_RECONNECT_SECONDS = "3"
_THREADS = 8  # one for each kind, for what goes through beside it, and for NCCL
_TAIL = 600
_OF_NCCL = ("NCCL WARN", "NCCL error", "ncclInvalidUsage", "Duplicate GPU", "DistBackendError")


def measure(measured: Measured, sizes: Sizes, shared: Shared) -> None:  # noqa: ARG001 - the same for all phases
    if sizes != QUICK:
        # A job may join the stager when the ranks of the killed one are given up: not after the usual 10 s.
        os.environ["HOLDFAST_RECONNECT_SECONDS_MAX"] = _RECONNECT_SECONDS
    devices = torch.cuda.device_count()
    jobs = {
        "alone": _Job(measured, "alone", 1, "gloo", quick=sizes == QUICK),
        "ddp": _Job(measured, "ddp", _RANKS, "nccl" if devices >= _RANKS else "gloo", quick=sizes == QUICK),
        "fsdp2": _Job(measured, "fsdp2", min(_RANKS, devices), "nccl", quick=sizes == QUICK),
    }
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(_THREADS) as threads:
        for kind in ("ddp", "fsdp2"):
            jobs[kind].joining = stack.enter_context(standing(measured.folder / f"{kind}-stager"))
        asked = threads.submit(_nccl_says, measured)
        running: dict[str, Future[dict[str, Any]]] = {
            kind: threads.submit(job.killed_and_resumed, threads) for kind, job in jobs.items()
        }
        for kind, job in running.items():
            try:
                found[kind] = job.result()
            except Exception as error:  # noqa: BLE001 - the other jobs are looked at all the same
                found[kind] = {"error": f"{type(error).__name__}: {error}"[-_TAIL:]}
            measured.put(jobs=found)
        measured.put(nccl_with_two_ranks_on_one_card=asked.result())
    wrong = {kind: one for kind, one in found.items() if not one.get("same_bits")}
    if wrong:
        raise RuntimeError(f"not the same: {wrong}")


class _Job:
    """One kind of job."""

    def __init__(self, measured: Measured, kind: str, ranks: int, backend: str, *, quick: bool) -> None:
        self._measured, self._kind, self._ranks, self._backend = measured, kind, ranks, backend
        self._quick = quick
        self.joining: dict[str, str] = {}
        self._nccl_said = ""

    def killed_and_resumed(self, threads: ThreadPoolExecutor) -> dict[str, Any]:
        """Its figures."""
        try:
            through, resumed = self._both(threads)
        except RuntimeError as error:
            if self._backend != "nccl":
                raise
            self._backend, self._nccl_said = "gloo", str(error)[-_TAIL:]
            through, resumed = self._both(threads)
        first = {one["first_step"] for one in resumed}
        same = [one["digest"] for one in through] == [one["digest"] for one in resumed]
        return {
            "ranks": self._ranks,
            "backend": self._backend,
            **({"nccl_said": self._nccl_said} if self._nccl_said else {}),
            "killed_at": _KILLED_AT,
            "resumed_first_step": sorted(first),
            "same_bits": same and 0 not in first,
        }

    def _both(self, threads: ThreadPoolExecutor) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """What the ranks have written that went through, and those that were killed and went on."""
        through = threads.submit(self._launch, "through", {})
        try:
            self._launch("killed", self.joining, killed_at=_KILLED_AT)
            resumed = self._launch("killed", self.joining)
            return through.result(), resumed
        finally:
            through.exception()  # nothing of it outlives this

    def _launch(self, name: str, joining: dict[str, str], *, killed_at: int = 0) -> list[dict[str, Any]]:
        """What its ranks have written; nothing where they are killed."""
        folder = self._measured.folder / f"{self._kind}-{name}"
        (folder / "tier").mkdir(parents=True, exist_ok=True)
        for old in folder.glob("result-*.json"):
            old.unlink()
        rank = [
            *("-m", "benchmarks.gpu.job_rank", self._kind, self._backend, str(folder / "result")),
            *(str(_STEPS), str(killed_at), *(["--quick"] if self._quick else [])),
        ]
        tier = {"HOLDFAST_STORE": str(folder / "store"), "HOLDFAST_TIERS": f"memory:{folder / 'tier'}"}
        environment = {
            **os.environ,
            **(joining or tier),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "HOLDFAST_ON_FULL": "wait",
            "OMP_NUM_THREADS": "1",
        }
        code, said = _run(rank, self._ranks if self._kind != "alone" else 0, environment, self._measured)
        if killed_at:
            if code == 0 or "SIGKILL" not in said + signal.Signals(-code if code < 0 else 1).name:
                raise RuntimeError(f"it was not killed: {code}\n{said}")
            return []
        results = sorted(folder.glob("result-*.json"))
        if code or len(results) != self._ranks:
            raise RuntimeError(f"{self._kind}, {name} ended with {code}\n{said}")
        return [json.loads(path.read_text(encoding="utf-8")) for path in results]


def _nccl_says(measured: Measured) -> str:
    """Of two ranks on one card: "works", or the reason why not."""
    rank = ["-m", "benchmarks.gpu.job_rank", "probe", "nccl", str(measured.folder), "0", "0"]
    code, said = _run(rank, _RANKS, {**os.environ, "NCCL_DEBUG": "WARN"}, measured)
    if code == 0:
        return "works"
    lines = said.splitlines()
    told = [line for line in lines if any(word in line for word in _OF_NCCL)]
    return f"refused: {' | '.join((told or lines[-3:])[:3])[:_TAIL]}"


def _run(rank: list[str], ranks: int, environment: dict[str, str], measured: Measured) -> tuple[int, str]:
    """Exit code and output of ranks under torchrun, or of one process where there are 0 of them."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    kept = {
        name: value
        for name, value in environment.items()
        if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    process = subprocess.Popen(
        [sys.executable, *(torchrun if ranks else []), *rank],
        cwd=_ROOT,
        env=kept,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=max(1.0, measured.seconds_left() - _END_SECONDS))
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise RuntimeError("it did not end in time") from None
    return process.returncode, said
