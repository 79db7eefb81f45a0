"""The cluster of docker-compose.yml loses ranks, has one cut off, continues, and ends like an undisturbed one."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.compose.cluster import NFS, ComposeCluster, running_compose
from tests.compose.engine import BASE, BRIDGE, Engine, Unbuildable, index_of_wheels, running_engine, why_not
from tests.hosts.network import command
from tests.nfs.machine import Guest, RunElsewhere, missing_parts, running_ganesha
from tests.support.cluster import wait_until
from tests.support.job import REPOSITORY

STEPS, EVERY = 800, 20
OPTIONS = f"--steps {STEPS} --every {EVERY} --layers 2 --width 128"
RUN, REFERENCE = "s3://holdfast/run", "s3://holdfast/reference"
TAP = "hfcomposetap"
GRAFANA = REPOSITORY / "infra" / "grafana"

# Fetches both files through S3 and opens them with torch, without holdfast.
COMPARE = """
import sys, boto3, torch
states = []
for key in sys.argv[1:]:
    boto3.client("s3").download_file("holdfast", key, "/tmp/checkpoint")
    states.append(torch.load("/tmp/checkpoint", weights_only=True))
def differing(a, b, where):
    if type(a) is not type(b):
        return [where]
    if isinstance(a, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [where]
    if isinstance(a, dict):
        if list(a) != list(b):
            return [where]
        return [one for key in a for one in differing(a[key], b[key], f"{where}.{key}")]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [where]
        return [one for index in range(len(a)) for one in differing(a[index], b[index], f"{where}.{index}")]
    return [] if a == b else [where]
assert "holdfast" not in sys.modules
assert states[0]["model"]
assert not differing(*states, "state"), differing(*states, "state")
print(len(states[0]["model"]), "tensors of the model, all the same")
"""

# Queries as Grafana's server does: from inside the cluster, at the URL of the data source.
ASK = """
import json, sys, urllib.parse, urllib.request
for query in sys.argv[2:]:
    url = sys.argv[1] + "/api/v1/query?" + urllib.parse.urlencode({"query": query})
    print(json.dumps(len(json.load(urllib.request.urlopen(url, timeout=30))["data"]["result"])))
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """A Docker engine; skips the tests where none can be started, or no base image can be made."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    try:
        with running_engine() as engine:
            yield engine
    except Unbuildable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def index() -> Iterator[str]:
    """A package index for the builds; skips the tests where pip cannot download its packages."""
    try:
        with index_of_wheels() as url:
            yield url
    except Unbuildable as error:
        pytest.skip(str(error))


@pytest.mark.timeout(2400)
def test_the_cluster_loses_ranks_and_a_link_and_ends_as_if_it_had_not(
    engine: Engine, index: str, tmp_path: Path
) -> None:
    with running_compose(engine, tmp_path, index=index, TRAIN_OPTIONS=OPTIONS) as cluster:
        cluster.up("stager", "prometheus")
        cluster.wait_for_step(4 * EVERY)
        assert min(cluster.steps()) < EVERY
        wait_until(lambda: cluster.value("sum(up)") == 2, 60, "Prometheus does not hear stager and flusher")
        _dashboard_is_fed(cluster)

        # Both spot machines are preempted.
        cluster.kill("rank0", "rank1")
        cluster.wait_ended("stager")
        saved = _newest(cluster, RUN)
        cluster.up("stager")
        cluster.wait_for_step(saved + 1 + 2 * EVERY)
        assert saved < min(cluster.steps()) <= saved + 10, "the training went on elsewhere"

        # The second one is cut from the network: its connections are not closed.
        cluster.cut("rank1")
        wait_until(
            lambda: cluster.value("holdfast_ranks_silent") == 1, 120, "Prometheus is not told of the silence"
        )
        assert "rank 1 on host rank1" in cluster.log("stager")
        wait_until(lambda: "HoldfastRankSilent" in _alerts(cluster), 60, "no alarm")
        saved = _newest(cluster, RUN)
        cluster.compose("rm", "--stop", "--force", "rank1", "stager")
        assert _newest(cluster, RUN) == saved, "nothing was lost, nothing was made up"
        cluster.up("stager")
        assert cluster.wait_ended("stager") == 0, cluster.log("stager")
        assert saved < min(cluster.steps()) <= saved + 10, "the training went on elsewhere"

        # The same training without a disturbance.
        engine.environment["HOLDFAST_STORE"] = REFERENCE
        cluster.up("stager")
        assert cluster.wait_ended("stager") == 0, cluster.log("stager")
        assert min(cluster.steps()) < EVERY
        assert _newest(cluster, RUN) == _newest(cluster, REFERENCE) == STEPS - 1
        keys = [
            f"{store.rpartition('/')[2]}/{cluster.checkpoints(store)[0]['file']}"
            for store in (RUN, REFERENCE)
        ]
        assert "all the same" in cluster.in_node("python", "-I", "-c", COMPARE, *keys)
    assert cluster.left() == []


def _alerts(cluster: ComposeCluster) -> set[str]:
    """Names of alerts that are pending or firing."""
    return {alert["labels"]["alertname"] for alert in cluster.ask("alerts")["alerts"]}


def _newest(cluster: ComposeCluster, store: str) -> int:
    """The newest step in the store; checks that every checkpoint is whole."""
    found = cluster.checkpoints(store)
    assert {one["state"] for one in found} <= {"verified", "durable"}, found
    return int(found[0]["step"])


def _dashboard_is_fed(cluster: ComposeCluster) -> None:
    """Check the queries of Grafana's data source and dashboard; Grafana itself does not run."""
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/holdfast.yml").read_text())["datasources"]
    dashboard: Any = json.loads((GRAFANA / "dashboards/holdfast.json").read_text())
    chosen = {one["name"]: one["current"]["value"] for one in dashboard["templating"]["list"]}
    assert chosen["source"] == source["uid"]
    queries = [
        str(target["expr"]).replace("$run", ".*")
        for panel in dashboard["panels"]
        for target in panel["targets"]
    ]
    answers = [int(line) for line in cluster.in_node("python", "-c", ASK, source["url"], *queries).split()]
    fed = {query for query, found in zip(queries, answers, strict=True) if found}
    fed_metrics = {query.partition("{")[0].split(" and ")[0] for query in fed}
    assert {"holdfast_newest_step", "holdfast_ring_chunks", "up"} <= fed_metrics
    groups = cluster.ask("rules")["groups"]
    assert all(rule["health"] == "ok" for group in groups for rule in group["rules"]), groups


@pytest.mark.timeout(1800)
def test_the_image_for_pods_runs_as_the_job_set_runs_it(engine: Engine, index: str) -> None:
    engine.build(
        *("--build-arg", f"BASE={BASE}", "--build-arg", f"PIP_INDEX_URL={index}"),
        *("--tag", "holdfast-pods:local", "--file", "infra/kubernetes/Containerfile", "."),
    )
    pod = ["docker", "run", "--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp", "--shm-size", "2g"]
    pod += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "holdfast-pods:local"]
    assert engine.run(*pod, "holdfast", "--version").startswith("holdfast ")
    examined = engine.run(*pod, "holdfast", "doctor")
    assert "fit" in examined.splitlines()[-1]


@pytest.mark.timeout(1800)
def test_the_nfs_server_takes_everybody_for_one_user_and_root_alone(
    engine: Engine, index: str, tmp_path: Path
) -> None:
    """The client is a guest with its own kernel: mounting needs an NFS client, which this machine's kernel may lack."""
    reason = missing_parts()
    if reason:
        pytest.skip(reason)
    volume = yaml.safe_load((REPOSITORY / NFS).read_text())["volumes"]["nfs"]["driver_opts"]
    server = re.search(r"addr=([\d.]+)", volume["o"])
    assert server is not None
    with (
        running_compose(engine, tmp_path, NFS, index=index, beside=_for_this_version(engine)) as cluster,
        running_ganesha(tmp_path) as folders,
        _tap(),
    ):
        cluster.up("nfs")
        command("ip", "link", "set", TAP, "master", BRIDGE, "up")
        elsewhere = RunElsewhere(f"{server[1]}{volume['device']}", volume["o"], TAP, "172.31.250.99")
        guest = Guest(tmp_path, folders.port, first=1, count=2, elsewhere=elsewhere)
        try:
            guest.wait_for("ended")
            guest.wait_ended()
        finally:
            said = guest.kill()
        assert "refused" in said, said
        assert any("vers=4.2" in line for line in said if line.startswith("mounted")), said
        assert guest.durable_steps() == {1, 2}
        inside = [
            "docker",
            "run",
            "--rm",
            "--network",
            "none",
            "--volume",
            f"{cluster.volume('export')}:/export:ro",
        ]
        owners = engine.run(*inside, "holdfast:local", "find", "/export", "-printf", "%U:%G\n").split()
        assert set(owners) == {"873:873"}
        assert len(owners) > 2
        verified = engine.run(
            *inside, "holdfast:local", "holdfast", "verify", "/export/training", "--all", "--json"
        )
        assert {one["step"] for one in json.loads(verified)["checkpoints"]} == {1, 2}
    assert cluster.left() == []


def _for_this_version(engine: Engine) -> str:
    """Engines before 24.0.3 allow name_to_handle_at only with CAP_SYS_ADMIN (moby, pull request 45766)."""
    version = engine.run("docker", "version", "--format", "{{.Server.Version}}").partition("+")[0]
    if tuple(map(int, version.strip().split("."))) >= (24, 0, 3):
        return ""
    return "services:\n  nfs:\n    security_opt:\n      - seccomp:unconfined\n"


@contextlib.contextmanager
def _tap() -> Iterator[None]:
    command("ip", "tuntap", "add", TAP, "mode", "tap")
    try:
        yield
    finally:
        command("ip", "link", "del", TAP)
