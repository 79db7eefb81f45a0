"""How stager and ranks are started by each launcher."""

from __future__ import annotations

from enum import StrEnum


class Launcher(StrEnum):
    MPIRUN = "mpirun"
    TORCHRUN = "torchrun"
    SLURM = "slurm"
    KUBERNETES = "kubernetes"
    SKYPILOT = "skypilot"


_PORT = 29411
_STAGER = "holdfast stager --store {store} --listen 0.0.0.0:{port} --key-file key"
_RANKS = (
    "HOLDFAST_STAGER={host}:{port} HOLDFAST_KEY_FILE=key "
    "holdfast rank -- torchrun --nproc-per-node {ranks} {script}"
)
_SEVERAL = "with torchrun's --nnodes, --rdzv-backend c10d and --rdzv-endpoint"


def start_lines(launcher: Launcher, script: str, *, ranks: int, store: str) -> list[tuple[str, str]]:
    """What to run, in order: where, and the line of shell.

    Args:
        launcher: The launcher.
        script: The training script.
        ranks: Number of training ranks; where one launcher is for one machine, those of a machine.
        store: URL of the run.
    """
    names = {"script": script, "ranks": ranks, "store": store, "port": _PORT}
    if launcher is Launcher.MPIRUN:
        line = "mpirun --with-ft ulfm -n {ranks} python {script} : -n 1 holdfast stager --store {store}"
        return [("on the machine of the stager", line.format(**names))]
    if launcher is Launcher.SLURM:
        line = "sbatch --ntasks-per-node={ranks} infra/slurm/holdfast.sbatch {store} python {script}"
        return [("on a login node", line.format(**names))]
    hosts = {
        Launcher.TORCHRUN: (
            "on the machine of the stager",
            "STAGER_HOST",
            f"on the machine of the ranks; where there are several, on each, {_SEVERAL}",
        ),
        Launcher.KUBERNETES: (
            "in the pod of the stager (infra/kubernetes/jobset.yaml has all pods of a job)",
            "STAGER_POD",
            f"in the pod of the ranks; where there are several, in each, {_SEVERAL}",
        ),
        Launcher.SKYPILOT: (
            "as `run` of the stager's task (infra/skypilot/job-group.yaml has both tasks)",
            "STAGER_HOST",
            f"as `run` of the ranks' task; for several nodes {_SEVERAL}",
        ),
    }
    stager, host, of_ranks = hosts[launcher]
    return [
        ("once, for a file that only you may read", "(umask 077 && holdfast stager --new-key > key)"),
        (stager, _STAGER.format(**names)),
        (of_ranks, _RANKS.format(**names, host=host)),
    ]
