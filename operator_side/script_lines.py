"""`holdfast init`: the lines that a training script needs, their places, and the lines that start the job. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from enum import StrEnum

_OWN_LOOP = """\
# (1) with the other imports
from holdfast import Checkpointer, PerRank, RngState, init_torch_distributed

# (2) in place of init_process_group; "gloo" without GPUs
rank, ranks = init_torch_distributed("nccl")

# (3) before the training loop; every object that must resume, by name: a gradient scaler and weight averages too
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": PerRank(RngState())}
checkpointer = Checkpointer(state, every=100)
first = checkpointer.restore()  # the step to run next; 0 in a new run

# (4) if one loop counts the steps: in place of its `for`
for step in range(first, steps):

# (5) if there is a loop over epochs: in place of its `for`; an epoch that ends with the checkpoint is ended again
for epoch in range(max(first - 1, 0) // len(loader), epochs):

# (6) in place of the `for` over the batches of an epoch
for step, batch in enumerate(loader, epoch * len(loader)):
    if step < first:
        continue  # trained before the checkpoint

# (7) among the arguments of the DataLoader, so that an epoch that begins draws none of the training's random numbers
generator=torch.Generator(),

# (8) last in the loop, after optimizer.step() and all else that changes the state
checkpointer.step(step)  # saves after every 100 steps

# (9) after the training loop
checkpointer.close()  # waits until the last checkpoint is durable
"""
_LIGHTNING = """\
# (1) with the other imports
from holdfast.integrations.lightning import HoldfastCallback, HoldfastEnvironment

# (2) among the arguments of Trainer; "gloo" without GPUs
plugins=[HoldfastEnvironment("nccl")],
callbacks=[HoldfastCallback(every=100)],
"""
_TRAINER = """\
# (1) with the other imports
from holdfast import init_torch_distributed
from holdfast.integrations.transformers import HoldfastCallback

# (2) before TrainingArguments, which need data_seed=...; "gloo" without GPUs
init_torch_distributed("nccl")
holdfast = HoldfastCallback(every=100)

# (3) among the arguments of Trainer
callbacks=[holdfast],

# (4) in place of trainer.train()
trainer.train(resume_from_checkpoint=holdfast.restore(trainer))
"""
_ACCELERATE = """\
# (1) with the other imports
from holdfast import Checkpointer, init_torch_distributed
from holdfast.integrations.accelerate import prepared

# (2) before the Accelerator; "gloo" without GPUs
init_torch_distributed("nccl")

# (3) before the training loop, after accelerator.prepare()
checkpointer = Checkpointer(prepared(accelerator), every=100)
first = checkpointer.restore()  # the step to run next; 0 in a new run

# (4) last in the loop, when no accumulated gradients are left over
checkpointer.step(step)  # saves after every 100 steps

# (5) after the training loop
checkpointer.close()  # waits until the last checkpoint is durable
"""
_DATA = "docs/data.md has a sampler that resumes without reading the batches before the checkpoint again"
# Pattern of an import -> the lines for that framework, and its name.
_FRAMEWORKS = (
    (r"^\s*(from|import)\s+(pytorch_)?lightning\b", _LIGHTNING, "Lightning"),
    (r"^\s*from\s+transformers\s+import\s+(\([^)]*|.*)\bTrainer\b", _TRAINER, "Hugging Face's Trainer"),
    (r"^\s*(from|import)\s+accelerate\b", _ACCELERATE, "Accelerate"),
)


def script_lines(source: str, *, every: int) -> tuple[str, str]:
    """Return the lines to add, each below a comment with its place, and a note on documentation. They are for the
    framework that `source`, the script, imports.
    """
    lines, note = _OWN_LOOP, _DATA
    for pattern, of_framework, name in _FRAMEWORKS:
        if re.search(pattern, source, re.MULTILINE):
            lines, note = of_framework, f"these lines are for {name}; docs/frameworks.md explains them"
            break
    return lines.replace("100", str(every)), note


class Launcher(StrEnum):
    MPIRUN = "mpirun"
    TORCHRUN = "torchrun"
    SLURM = "slurm"
    KUBERNETES = "kubernetes"
    SKYPILOT = "skypilot"


_PORT = 29411
_RENDEZVOUS_PORT = 29400
_STAGER = "holdfast stager --store {store} --listen 0.0.0.0:{port} --key-file key"
_RANKS = (
    "HOLDFAST_STAGER={host}:{port} HOLDFAST_KEY_FILE=key "
    "holdfast rank -- torchrun --nproc-per-node {ranks} {script}"
)
_SEVERAL = "with torchrun's --nnodes, --rdzv-backend c10d and --rdzv-endpoint"


def start_lines(launcher: Launcher, script: str, *, ranks: int, store: str) -> list[tuple[str, str]]:
    """Return the shell lines that start the job, in order, each with the machine to run it on. `ranks`: per machine,
    for single-machine launchers.
    """
    names = {"script": script, "ranks": ranks, "store": store, "port": _PORT}
    if launcher is Launcher.MPIRUN:
        line = "mpirun --with-ft ulfm -n {ranks} python {script} : -n 1 holdfast stager --store {store}"
        return [("on the stager's machine", line.format(**names))]
    if launcher is Launcher.SLURM:
        line = "sbatch --ntasks-per-node={ranks} infra/slurm/holdfast.sbatch {store} python {script}"
        return [("on a login node", line.format(**names))]
    stager, host, of_ranks = {
        Launcher.TORCHRUN: ("on the stager's machine", "STAGER_HOST", "on each machine of the ranks"),
        Launcher.KUBERNETES: (
            "in the stager's pod (infra/kubernetes/jobset.yaml has all pods of a job)",
            "STAGER_POD",
            "in each pod of the ranks",
        ),
        Launcher.SKYPILOT: (
            "as `run` of the stager's task (infra/skypilot/job-group.yaml has both tasks)",
            "STAGER_HOST",
            "as `run` of the ranks' task",
        ),
    }[launcher]
    return [
        ("once, for a file that only you may read", "(umask 077 && holdfast stager --new-key > key)"),
        (stager, _STAGER.format(**names)),
        (f"{of_ranks}; if there are several, {_SEVERAL}", _RANKS.format(**names, host=host)),
    ]


def lines_for_several_machines(
    arguments: Sequence[str], *, ranks: int, restarts_max: int, store: str, host: str
) -> list[tuple[str, str]]:
    """Return the shell lines that start a job of several machines with torchrun, in order, each with its place.

    `arguments`: torchrun's last ones. `ranks`: per machine. `host`: this machine, which runs the stager.
    """
    names = {"store": shlex.quote(store), "port": _PORT}
    at_store = "" if "://" in store else f"; {store} must be the same directory on every machine"
    job = (
        f"HOLDFAST_STAGER={host}:{_PORT} HOLDFAST_KEY_FILE=key holdfast rank -- torchrun --nnodes NODES "
        f"--nproc-per-node {ranks} --rdzv-backend c10d --rdzv-endpoint NODE:{_RENDEZVOUS_PORT} "
        f"--max-restarts {restarts_max} {shlex.join(arguments)}"
    )
    return [
        (
            f"on {host}, which must not be preempted, the key",
            "(umask 077 && holdfast stager --new-key > key)",
        ),
        ("the key to each machine of the ranks", "scp -p key NODE:"),
        (f"on {host}, the stager{at_store}", _STAGER.format(**names)),
        ("on each machine of the ranks, NODES in all, with one of them for NODE", job),
    ]
