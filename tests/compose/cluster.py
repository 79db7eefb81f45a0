"""The cluster of docker-compose.yml, started, inspected and taken down by `docker-compose`, as a user does."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tests.compose.engine import BASE, BRIDGE, Engine
from tests.support.cluster import wait_until
from tests.support.free_port import free_port
from tests.support.job import REPOSITORY

__all__ = ["NFS", "ComposeCluster", "running_compose"]

NFS = "infra/docker/nfs.yml"
_PROJECT = "holdfast-test"
_STEP = re.compile(r"^step +(\d+) ", re.MULTILINE)
_SECONDS_MAX = 300.0
_TRAINING_SECONDS_MAX = 600.0


class ComposeCluster:
    """One project of Compose.

    Args:
        files: The Compose files, the first one docker-compose.yml.
        variables: Environment that a user would set: settings, build arguments.
    """

    def __init__(self, engine: Engine, files: Sequence[str | Path], variables: dict[str, str]) -> None:
        self.engine = engine
        self.prometheus = free_port()
        engine.environment.update(variables, PROMETHEUS_PORT=str(self.prometheus))
        self._compose = ["docker-compose", "--project-name", _PROJECT]
        self._compose += [word for file in files for word in ("--file", str(file))]

    def compose(self, *words: str, seconds_max: float = _SECONDS_MAX) -> str:
        """Run `docker-compose` with these words; return its output."""
        return self.engine.run(*self._compose, *words, seconds_max=seconds_max)

    def up(self, *services: str) -> None:
        """Start services that are not running, dependencies first, as `docker-compose up --detach` does."""
        self.compose("up", "--detach", "--no-build", *services)

    def container(self, service: str) -> str:
        """Id of the service's container, running or ended."""
        return self.engine.run("docker", "ps", "--all", "--quiet", *self._of(service)).split()[0]

    def kill(self, *services: str) -> None:
        """`docker kill`: SIGKILL all processes of these services."""
        self.engine.run("docker", "kill", *map(self.container, services))

    def cut(self, service: str) -> None:
        """`docker network disconnect`: the container keeps running, and no other container can reach it."""
        self.engine.run("docker", "network", "disconnect", f"{_PROJECT}_cluster", self.container(service))

    def state(self, service: str) -> dict[str, Any]:
        """The engine's record of the container: `Status`, `ExitCode`, `StartedAt`."""
        found: list[dict[str, Any]] = json.loads(
            self.engine.run("docker", "inspect", self.container(service))
        )
        state: dict[str, Any] = found[0]["State"]
        return state

    def wait_ended(self, service: str) -> int:
        """Wait for the end of the service; return its exit code."""
        try:
            return int(
                self.engine.run("docker", "wait", self.container(service), seconds_max=_TRAINING_SECONDS_MAX)
            )
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{service} runs on:\n{self.log(service)}") from None

    def log(self, service: str) -> str:
        """Both outputs of the service since it was last started."""
        words = ["docker", "logs", "--since", self.state(service)["StartedAt"], self.container(service)]
        done = subprocess.run(
            words, env=self.engine.environment, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout + done.stderr

    def steps(self) -> list[int]:
        """Steps that rank 0 has reported since the training was last started."""
        return [int(step) for step in _STEP.findall(self.log("stager"))]

    def wait_for_step(self, step: int) -> None:
        """Wait until rank 0 reports this step or a later one."""

        def told() -> bool:
            assert self.state("stager")["Status"] == "running", self.log("stager")
            return max(self.steps(), default=-1) >= step

        wait_until(told, _SECONDS_MAX, lambda: f"step {step} does not come:\n{self.log('stager')}")

    def in_node(self, *command: str) -> str:
        """Run a command in a container beside the cluster, from the nodes' image and with their environment."""
        return self.compose("run", "--rm", "--no-deps", "-T", "stager", *command)

    def checkpoints(self, store: str) -> list[dict[str, Any]]:
        """Checkpoints as `holdfast ls` lists them, newest first."""
        found: list[dict[str, Any]] = json.loads(self.in_node("holdfast", "ls", store, "--json"))[
            "checkpoints"
        ]
        return found

    def ask(self, path: str, **question: str) -> Any:
        """Prometheus's answer, at its port on this machine."""
        url = f"http://127.0.0.1:{self.prometheus}/api/v1/{path}?{urllib.parse.urlencode(question)}"
        with urllib.request.urlopen(url, timeout=30) as response:
            return json.load(response)["data"]

    def value(self, query: str) -> float | None:
        """The single current value of the query; None without a value."""
        result = self.ask("query", query=query)["result"]
        return float(result[0]["value"][1]) if result else None

    def volume(self, name: str) -> str:
        """The engine's name of a volume."""
        return f"{_PROJECT}_{name}"

    def left(self) -> list[str]:
        """Remaining containers, networks and volumes of the project."""
        kinds = (("ps", "--all"), ("network", "ls"), ("volume", "ls"))
        label = ("--quiet", "--filter", f"label=com.docker.compose.project={_PROJECT}")
        return [one for kind in kinds for one in self.engine.run("docker", *kind, *label).split()]

    def _of(self, service: str) -> list[str]:
        labels = {"project": _PROJECT, "service": service, "oneoff": "False"}
        return [
            word
            for name, value in labels.items()
            for word in ("--filter", f"label=com.docker.compose.{name}={value}")
        ]


def _with_bridge(files: Sequence[str]) -> str:
    """The network of these files, on a bridge with our name. Compose 1 uses only the last file's network."""
    merged: dict[str, Any] = {}
    for file in files:
        networks = yaml.safe_load((REPOSITORY / file).read_text()).get("networks", {})
        merged |= networks.get("cluster") or {}
    merged["driver_opts"] = {"com.docker.network.bridge.name": BRIDGE}
    return str(yaml.safe_dump({"networks": {"cluster": merged}}))


@contextlib.contextmanager
def running_compose(
    engine: Engine, place: Path, *files: str, index: str, beside: str = "", **variables: str
) -> Iterator[ComposeCluster]:
    """The project with docker-compose.yml and more files, its images built from `BASE`; taken down at the end.

    Args:
        index: URL of the package index of the builds.
        beside: One more Compose file, as text.
    """
    extra = [place / "engine.yml", *([place / "beside.yml"] if beside else [])]
    for path, text in zip(extra, (_with_bridge(files), beside), strict=False):
        path.write_text(text)
    arguments = {"BASE_IMAGE": BASE, "PIP_INDEX_URL": index, "BUILD_NETWORK": "host"}
    prometheus = REPOSITORY / "tests" / "compose" / "prometheus"
    engine.build("--build-arg", f"BASE_IMAGE={BASE}", "--tag", "prometheus:debian", prometheus)
    all_files: list[str | Path] = ["docker-compose.yml", *files, *extra]
    cluster = ComposeCluster(
        engine, all_files, {**arguments, "PROMETHEUS_IMAGE": "prometheus:debian", **variables}
    )
    services = ["s3", "stager", *(["nfs"] if NFS in files else [])]
    cluster.compose("build", *services, seconds_max=1800)
    try:
        yield cluster
    finally:
        cluster.compose("down", "--volumes", "--timeout", "5")
