"""All transports between ranks and stager behave the same, in real processes: MPI, TCP, and TCP with TLS."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.mpirun import mpirun_command
from tests.conformance.jobs.transport import RANKS, SCENES
from tests.support.certificates import TestAuthority
from tests.support.job import Job, environment

_JOB = ("-m", "tests.conformance.jobs.transport")
_SECONDS_MAX = 120.0


def _over_mpi(tmp_path: Path) -> str:
    def with_own_stager(_command: list[str]) -> list[str]:
        job = [sys.executable, *_JOB, "mpi"]
        return mpirun_command(RANKS, [*job, "rank"], stager=[*job, "stager"], ulfm=True)

    env = environment(tmp_path / "run")
    with Job(RANKS, [], None, env=env, log=tmp_path / "log", rewrite=with_own_stager) as job:
        job.wait(_SECONDS_MAX)
        return job.output()


def _over_tcp(tmp_path: Path, transport: str) -> str:
    port_file = str(tmp_path / "port")
    env = environment(tmp_path / "run")
    command = [sys.executable, *_JOB, transport]
    if transport == "tls":
        TestAuthority(tmp_path).sign("stager")
    log = (tmp_path / "log").open("wb")
    ranks = []
    with log:
        stager = subprocess.Popen([*command, "stager", port_file], env=env, stdout=log, stderr=log)
        try:
            ranks = [
                subprocess.Popen([*command, "rank", port_file, str(rank)], env=env, stdout=log, stderr=log)
                for rank in range(RANKS)
            ]
            stager.wait(_SECONDS_MAX)
        finally:
            for process in (stager, *ranks):
                process.kill()
                process.wait()
    return (tmp_path / "log").read_text(errors="replace")


@pytest.mark.parametrize("transport", ["mpi", "tcp", "tls"])
def test_every_scene_holds(transport: str, tmp_path: Path) -> None:
    said = _over_mpi(tmp_path) if transport == "mpi" else _over_tcp(tmp_path, transport)
    assert [name for name in SCENES if f"held {name}" in said] == list(SCENES), said
