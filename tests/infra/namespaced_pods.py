"""A JobSet's pods in network, PID and mount namespaces, with the names, ports and /dev/shm of the file.

    holdfast-stager-0-0.holdfast:29411 ── a bridge of this machine ──┬── holdfast-ranks-0-0.holdfast
                                                                     └── holdfast-ranks-0-1.holdfast

A lost node sends nothing any more: no connection is closed. The names of a restarted pod have a new address. Mount
points of secrets and scratch are replaced by folders, and variables by those of the test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hosts.network import Network
from tests.infra.engine import PlayedJobSet, PlayedPod
from tests.infra.pod_host import PodHost

__all__ = ["NamespacedJobSet"]

_RATE = "1gbit"
_OWN = "/dev/shm"


@dataclass
class NamespacedPod(PlayedPod):
    """One pod in namespaces of its own."""

    host: PodHost | None = None

    def terminate(self) -> None:
        """SIGTERM process 1 of the pod, as the kubelet does."""
        assert self.host is not None
        if self.process.poll() is None:
            self.host.terminate()

    def kill(self) -> None:
        """Take the link down, then end the pod's processes and remove it."""
        assert self.host is not None
        self.host.remove()


class NamespacedJobSet(PlayedJobSet):
    """A `PlayedJobSet` whose pods run in namespaces.

    Args:
        jobset: The document.
        folder: For mounts and logs.
        network: The pods' network.
        secrets: Name of a secret or config map → its files → content.
        variables: Added to the file's own, or replacing them.
    """

    def __init__(
        self,
        jobset: Mapping[str, Any],
        folder: Path,
        network: Network,
        *,
        secrets: Mapping[str, Mapping[str, str]],
        variables: Mapping[str, str],
    ) -> None:
        # A pod has its own /tmp; the folder of this test is below this machine's.
        super().__init__(jobset, folder, secrets=secrets, variables={**variables, "TMPDIR": "/run/tmp"})
        self._ports = {port: port for port in self._ports}
        self._network, self._hosts = network, dict[str, PodHost]()
        self._names = folder / "names"

    def start(self, *jobs: str) -> None:
        """As `PlayedJobSet.start`; all of these pods get their names and addresses first."""
        for job in self._spec["replicatedJobs"]:
            if not jobs or job["name"] in jobs:
                for index in range(job["template"]["spec"]["parallelism"]):
                    name = self._pod_name(job["name"], index)
                    self._hosts[name] = PodHost(name, self._network, _RATE, self.folder)
        domain = self._spec["network"].get("subdomain", self._name)
        lines = [f"{host.address} {name} {name}.{domain}\n" for name, host in self._hosts.items()]
        self._names.write_text("127.0.0.1 localhost\n" + "".join(lines))  # in place: running pods see it
        super().start(*jobs)

    def _stop(self, pods: list[PlayedPod]) -> None:
        super()._stop(pods)
        for pod in pods:
            pod.kill()

    def _begin(
        self, job: str, index: int, line: list[str], place: Path, variables: dict[str, str]
    ) -> PlayedPod:
        host = self._hosts[self._pod_name(job, index)]
        process = host.start(
            line, names=self._names, place=place, log=self._log(job, index), variables=variables
        )
        return NamespacedPod(job, index, process, host=host)

    def _pod_name(self, job: str, index: int) -> str:
        return f"{self._name}-{job}-0-{index}"

    def _address(self, job: str) -> str:
        return self._hosts[self._pod_name(job, 0)].address

    def _here(self, text: str, mounts: Mapping[str, Path]) -> str:
        for path, folder in mounts.items():
            if path != _OWN and text.startswith(f"{path}/"):
                return f"{folder}{text.removeprefix(path)}"
        return text
