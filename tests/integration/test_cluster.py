"""`holdfast cluster up|status|down` against moto's EC2: from Terraform's outputs to the hostfile.

moto provides machines at once, has neither capacity limits nor quotas, forgets ClientTokens, and knows a single price;
tests/unit/operator_side/cluster covers these.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.mpirun import find_mpirun
from tests.support.ec2_place import client, write_outputs
from tests.support.job import environment
from tests.support.moto_s3 import running_moto

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with running_moto() as url:
        yield url


class Operator:
    """An operator with a Terraform output and the command."""

    def __init__(self, directory: Path, endpoint: str, run_id: str) -> None:
        self.directory, self.run_id = directory, run_id
        self.env = {**environment(directory / "runtime"), **CREDENTIALS, "AWS_ENDPOINT_URL": endpoint}
        self.ec2 = client(endpoint)
        self.file = directory / "terraform-output.json"
        write_outputs(self.file, self.ec2, run_id)

    def call(self, verb: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "holdfast", "cluster", verb, "--from", str(self.file), *arguments]
        return subprocess.run(line, env={**self.env, **env}, capture_output=True, text=True, check=False)

    def document(self, verb: str, *arguments: str) -> Any:
        done = self.call(verb, "--json", *arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def live(self) -> list[Any]:
        groups = self.ec2.describe_instances(Filters=[{"Name": "tag:RunId", "Values": [self.run_id]}])[
            "Reservations"
        ]
        return [i for group in groups for i in group["Instances"] if i["State"]["Name"] == "running"]


def test_up_status_down(endpoint: str, tmp_path: Path) -> None:
    operator = Operator(tmp_path, endpoint, "run-1")
    hostfile = tmp_path / "hosts"
    wish = ("--nodes", "3", "--types", "c5.large,m5.large", "--slots", "2", "--hostfile", str(hostfile))
    raised = operator.document("up", *wish)
    live = operator.live()
    assert len(live) == 4
    for instance in live:
        tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
        assert {
            "Project": "holdfast",
            "RunId": "run-1",
            "Team": "sea",
            "ManagedBy": "holdfast",
        }.items() <= tags.items()
        assert (instance.get("InstanceLifecycle") == "spot") == (tags["Role"] == "train")
    trainers = [node for node in raised["nodes"] if node["role"] == "train"]
    assert sorted(hostfile.read_text().splitlines()) == sorted(
        f"{node['address']} slots=2" for node in trainers
    )
    assert _placed(raised["mpirun"], tmp_path) == ["rank"] * 6 + ["stager"]
    assert "--store s3://bucket/run-1" in raised["run"]

    assert operator.document("up", *wish)["made"] == []
    assert len(operator.live()) == 4

    status = operator.document("status")
    assert len(status["nodes"]) == 4
    assert status["taken"] == []
    shown = operator.call("status")
    assert "on demand" in shown.stdout
    assert "3 trainers, 1 stager" in shown.stdout

    assert len(operator.document("down")["ended"]) == 4
    assert operator.live() == []
    again = operator.call("down")
    assert again.returncode == 0
    assert "nothing is left with Project=holdfast, RunId=run-1" in again.stdout


def _placed(line: str, directory: Path) -> list[str]:
    """The output of the processes that mpirun starts by this line; an agent in the place of ssh starts them all here.

    Each daemon has a folder for temporary files, as on a host of its own. Daemons of one job that share it remove
    each other's session directory, and mpirun waits forever for one that has lost its own.
    """
    agent = directory / "agent"
    agent.write_text(
        f'#!/bin/sh\nshift\nTMPDIR=$(mktemp -d {directory}/host-XXXXXX)\nexport TMPDIR\nexec sh -c "$*"\n'
    )
    agent.chmod(0o755)
    mpirun = f"{find_mpirun()} --allow-run-as-root --prtemca plm_ssh_agent {agent}"
    ranks, stager = line.replace("mpirun", mpirun, 1).split(" : ")
    assert ranks.endswith(" python train.py")
    assert " holdfast stager --store s3://" in stager
    ranks = f"{ranks.removesuffix('python train.py')} echo rank"
    stager = f"{stager.partition('holdfast stager')[0]} echo stager"
    done = subprocess.run(
        [*ranks.split(), ":", *stager.split()], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.split())


def test_the_run_finds_its_hosts(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = Operator(tmp_path, endpoint, "run-2")
    operator.document("up", "--nodes", "2", "--types", "c5.large", "--slots", "4")
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, operator.env[name])
    from operator_side.cluster.fleet import load_fleet

    fleet = load_fleet(operator.file)
    hosts = fleet.list_hosts()
    assert [host.slots for host in hosts] == [4, 4]
    lost = next(i for i in operator.live() if i["PrivateIpAddress"] == hosts[0].name)
    operator.ec2.terminate_instances(InstanceIds=[lost["InstanceId"]])
    assert fleet.list_hosts() == hosts[1:]
    fleet.request_hosts(4)
    now = fleet.list_hosts()
    assert len(now) == 2
    assert hosts[1] in now
    operator.document("down")


@pytest.mark.parametrize("what", ["credentials", "template", "file", "types", "in-use"])
def test_cluster_up_names_errors_that_a_person_must_mend(endpoint: str, tmp_path: Path, what: str) -> None:
    operator = Operator(tmp_path, endpoint, f"run-{what}")
    wish = ["--nodes", "1", "--types", "c5.large"]
    env = {}
    code, words = 2, ""
    match what:
        case "credentials":
            env = {
                "AWS_ACCESS_KEY_ID": "",
                "AWS_SECRET_ACCESS_KEY": "",
                "AWS_EC2_METADATA_DISABLED": "true",
                "HOME": str(tmp_path),
            }
            words = "no AWS credentials"
        case "template":
            text = operator.file.read_text()
            template = json.loads(text)["trainer_launch_template"]["value"]["id"]
            operator.file.write_text(text.replace(template, "lt-0123456789abcdef0"))
            words = "lt-0123456789abcdef0"
        case "file":
            operator.file.write_text("{}")
            words = "region: missing"
        case "types":
            wish = ["--nodes", "1", "--types", " , "]
            words = "--types"
        case "in-use":
            other = json.loads(operator.file.read_text())
            other["run_id"]["value"] = "another-run"
            operator.document("up", *wish)
            operator.file.write_text(json.dumps(other))
            code, words = 8, "in use by another cluster"
    done = operator.call("up", *wish, **env)
    assert done.returncode == code, done.stderr
    assert words in " ".join(done.stderr.split())
    assert len(operator.live()) == (2 if what == "in-use" else 0)
    assert "Traceback" not in done.stderr
    assert os.environ.get("AWS_ENDPOINT_URL") != endpoint
