"""A training loop that saves after every step, faster than its store can write, and records the results.

`python pressure.py OUT SCENARIO STEPS`. Scenarios: `together`: the ranks meet in each step, as in any data-parallel
training, rank 1 always late; `apart`: they never meet, and rank 1 is three times as slow; `lost`: as `together`, and
rank 0 kills the stager in mid-run. With THROTTLED_STALL (tests/support/throttled_site) in the environment the store
accepts nothing from the first save on. Writes to OUT, per rank: the result of each `save()`, the memory of all
processes after each step (rank 0), and the final state.

Training allocates nothing after its first step: any growth would be the checkpointer's.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.support.no_compiler import do_without_compiler
from trainer_side import Checkpointer, init_torch_distributed

TENSORS = 36
STEP_SECONDS = 0.05
CLEAR_PEAK = "5"  # written to /proc/self/clear_refs, resets VmHWM


def memory(pid: int | str = "self") -> dict[str, int]:
    """Return peak, resident, and anonymous resident bytes; empty for a process that is dead or about to be."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    fields = dict(line.split(":", 1) for line in status.splitlines())
    names = ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem")
    return {name: int(fields[name].split()[0]) * 1024 for name in names if name in fields}


def others() -> dict[str, int]:
    """Return the pids of this job's stager and flusher."""
    found: dict[str, int] = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get("HOLDFAST_RUNTIME_DIR") != os.environ["HOLDFAST_RUNTIME_DIR"]:
                continue
            words = process.cmdline()
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if words[1:4] == ["-P", "-m", "flusher"]:
            found["flusher"] = process.pid
        elif "stager" in words[1:3] and "mpirun" not in words[0]:
            found["stager"] = process.pid
    return found


def main() -> None:
    out, scenario, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    numel = int(os.environ.get("PRESSURE_NUMEL", str(220_000)))
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    rank, _ = init_torch_distributed("gloo")
    do_without_compiler()
    torch.manual_seed(1)
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(numel)) for _ in range(TENSORS))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for parameter in model:
        parameter.grad = torch.zeros_like(parameter)
    checkpointer = Checkpointer({"model": model, "optimizer": optimizer})
    said: dict[str, Any] = {"pid": os.getpid(), "took": [], "memory": [], "lost_save_seconds": []}
    pids: dict[str, int] = {}
    if rank == 0 and "THROTTLED_STALL" in os.environ:
        Path(os.environ["THROTTLED_STALL"]).touch()
    for step in range(steps):
        began = time.monotonic()
        for place, parameter in enumerate(model):
            assert parameter.grad is not None
            parameter.grad.fill_(float((step + place) % 7 - 3))
        optimizer.step()
        if scenario == "apart":
            time.sleep(STEP_SECONDS * (1 + 2 * rank))
        else:
            time.sleep(STEP_SECONDS * 0.3 * rank)
            torch.distributed.all_reduce(torch.ones(1))
            time.sleep(max(0.0, STEP_SECONDS - (time.monotonic() - began)))
        if step == 0:
            Path("/proc/self/clear_refs").write_text(CLEAR_PEAK)
            said["baseline"] = memory()
            pids = others() if rank == 0 else {}
            said["pids"] = pids
        if scenario == "lost" and step == steps // 2 and rank == 0:
            os.kill(pids["stager"], signal.SIGKILL)
        lost, before = checkpointer._link.job.problem is not None, time.monotonic()
        took = checkpointer.save(step)
        if lost:
            said["lost_save_seconds"].append(time.monotonic() - before)
            assert not took
        said["took"].append(took)
        said["memory"].append(
            {"rank": memory(), **{name: found for name, pid in pids.items() if (found := memory(pid))}}
        )
    closing = time.monotonic()
    checkpointer.close()
    said["close_seconds"] = time.monotonic() - closing
    stats = checkpointer.stats
    said["stats"] = {
        "saved": stats.saved,
        "declined": stats.declined,
        "failed": stats.failed,
        "causes": stats.causes,
        "wait_seconds": stats.wait_seconds,
        "stalls": len(stats.cst_seconds),
    }
    said["durable_step"] = checkpointer.durable_step
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, out / f"final-{rank}.pt")
    (out / f"rank-{rank}.json").write_text(json.dumps(said))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
