"""The pods of Kubeflow's MPI runtime: each has network, processes, host name and /dev/shm of its own on this machine.

The commands are those of runtime-mpi.yaml, each as process 1 of its pod: when it ends, the kernel ends the pod. This
module simulates Trainer's additions (hostfile, keys, names, variables), the kubelet's end of a pod and the restart. It
replaces the number of ranks, the paths of mounts, and how long a pod waits after its notice.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tests.hosts.network import Network, command, running_network
from tests.infra.jobset_policies import JobSetPolicies
from tests.infra.pod_host import PodHost
from tests.infra.toolbox import INFRA
from tests.integration.jobs import in_a_pod
from tests.support.cluster import wait_until
from tests.support.job import environment

__all__ = ["PlayedMpiJob", "played_mpi"]

NODES = 2
_SECONDS_MAX = 120.0


class MpiPod(PodHost):
    """One pod."""

    def begin_hook(self, line: list[str]) -> subprocess.Popen[bytes]:
        """Start the command of the pod's preStop hook, in the pod."""
        return subprocess.Popen(
            ["nsenter", "--target", str(self.first()), "--all", *line], stdin=subprocess.DEVNULL
        )

    def kill_rank(self) -> None:
        """SIGKILL the rank of this pod."""
        found = [pid for pid in self.pids() if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        wrapper, rank = sorted(found)
        assert b"supervise.rank" in Path(f"/proc/{wrapper}/cmdline").read_bytes()
        os.kill(rank, signal.SIGKILL)


class PlayedMpiJob:
    """The JobSet of the runtime. Made by `played_mpi`; `pods` are those of the newest start."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.folder, self._network, self.pods = folder, network, list[MpiPod]()
        self.codes: list[dict[str, int | None]] = []
        runtime = yaml.safe_load((INFRA / "kubernetes" / "runtime-mpi.yaml").read_text())
        self._policies = JobSetPolicies(runtime["spec"]["template"]["spec"])
        for name in ("workspace", "out"):
            (folder / name).mkdir()
        shutil.copy(in_a_pod.__file__, folder / "workspace" / "train.py")
        for key in ("key", "host"):
            command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._variables = environment(folder / "unused", PATH=path) | {
            "HOLDFAST_STORE": str(folder / "store"),
            "HOLDFAST_RING_BYTES": "4MiB",
            "HOLDFAST_CHUNK_BYTES": "64KiB",
            "HOLDFAST_RUNTIME_DIR": "/dev/shm/holdfast",
            "XDG_STATE_HOME": str(folder / "state"),
            "OUT": str(folder / "out"),
            # A pod has its own /tmp; the folder of this test is below this machine's.
            "TMPDIR": "/run/tmp",
            # In the cluster mpirun is not root.
            **{
                f"{word}_ALLOW_RUN_AS_ROOT{end}": "1" for word in ("OMPI", "PRTE") for end in ("", "_CONFIRM")
            },
            # From Trainer's plugin for MPI (pkg/constants/constants.go in kubeflow/trainer).
            "OMPI_MCA_orte_default_hostfile": str(folder / "hostfile"),
            "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
            "OMPI_MCA_orte_set_default_slots": "1",
            "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        }
        given = " ".join(
            f'"{name}={self._variables[name]}"' for name in ("PATH", "OUT", "HOLDFAST_CHUNK_BYTES", "TMPDIR")
        )
        (folder / "sshd_config").write_text(
            f"Port 2222\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/key.pub\nStrictModes no\nUsePAM no\n"
            f"PermitRootLogin prohibit-password\nPidFile none\nSetEnv {given}\n"
        )
        (folder / "ssh").write_text(
            f"Host *\nUser root\nIdentityFile {folder}/key\nUserKnownHostsFile /dev/null\n"
            "BatchMode yes\nLogLevel ERROR\n"
        )

    def start(self) -> None:
        """Start the nodes' pods, and the launcher's pod once they listen."""
        names = [f"holdfast-node-0-{index}" for index in range(NODES)]
        self.pods = [
            MpiPod(n, self._network, "1gbit", self.folder) for n in (*names, "holdfast-launcher-0-0")
        ]
        lines = [f"{pod.address} {pod.name} {pod.name}.holdfast\n" for pod in self.pods]
        (self.folder / "names").write_text("127.0.0.1 localhost\n" + "".join(lines))
        (self.folder / "hostfile").write_text("".join(f"{name}.holdfast slots=1\n" for name in names))
        for pod in self.pods[:-1]:
            self._begin(pod, "node")
            self._wait_ready(pod)
        self._begin(self.pods[-1], "launcher")

    def wait_for_ranks(self) -> None:
        """Wait until all ranks stand by in mid-run."""

        def ready() -> bool:
            assert all(pod.code() is None for pod in self.pods), self.output()
            return all((self.folder / "out" / f"ready-{rank}").exists() for rank in range(NODES))

        wait_until(ready, _SECONDS_MAX, lambda: f"the ranks do not come so far:\n{self.output()}")

    def take(self, pod: MpiPod, told: Callable[[], bool]) -> None:
        """End a node's pod as the kubelet does: first its hook, which here waits until `told`, then SIGTERM."""
        line = self._container("node")["lifecycle"]["preStop"]["exec"]["command"]
        over = self.folder / "out" / "over"
        waits = [re.sub(r"\bsleep \d+$", f"until [ -e {over} ]; do sleep 0.1; done", word) for word in line]
        assert waits != line
        hook = pod.begin_hook(waits)
        try:
            wait_until(told, _SECONDS_MAX, lambda: f"nobody hears of the notice:\n{self.output()}")
            assert hook.poll() is None, "the hook ends the pod before the deadline of its notice"
        finally:
            over.touch()
            hook.wait(_SECONDS_MAX)
        pod.terminate()

    def settle(self) -> str:
        """Run the pods until the policies have acted; return "Completed", or the action. A restart has begun then."""
        codes: dict[str, int | None] = {}

        def settled() -> bool:
            codes.update({pod.name: pod.code() for pod in self.pods})
            return any(codes.values()) or codes[self.pods[-1].name] == 0

        wait_until(settled, _SECONDS_MAX, lambda: f"no pod ends:\n{self.output()}")
        self.codes.append(codes)
        self.stop()
        failed = [(name, code) for name, code in codes.items() if code]
        if not failed:
            return "Completed"
        name, code = failed[0]
        action = self._policies.action(name.split("-")[1], code)
        if action.startswith("RestartJobSet"):
            self.start()
        return action

    def stop(self) -> None:
        """SIGTERM the launcher, give it time to write staged steps, then end every pod."""
        if self.pods and self.pods[-1].pids() and self.pods[-1].code() is None:
            self.pods[-1].terminate()
            with contextlib.suppress(AssertionError):
                wait_until(lambda: self.pods[-1].code() is not None, 30, "the launcher stays")
        for pod in self.pods:
            pod.remove()
        self.pods = []

    def output(self) -> str:
        """Output of all pods."""
        return "\n".join(
            f"--- {log.name}\n{log.read_text()[-4000:]}" for log in sorted(self.folder.glob("*.log"))
        )

    def starts(self, rank: int) -> list[int]:
        """The first step of each start of a rank."""
        return [int(line) for line in (self.folder / "out" / f"start-{rank}").read_text().split()]

    def _container(self, job: str) -> Any:
        (container,) = self._policies.job(job)["template"]["spec"]["template"]["spec"]["containers"]
        return container

    def _given(self, job: str) -> dict[str, str]:
        own = {one["name"]: one["value"] for one in self._container(job).get("env", []) if "value" in one}
        return own | self._variables

    def _begin(self, pod: MpiPod, job: str) -> None:
        pod.start(
            self._line(job),
            names=self.folder / "names",
            place=self.folder / "workspace",
            log=self.folder / f"{pod.name}.log",
            variables=self._given(job),
        )

    def _line(self, job: str) -> list[str]:
        container = self._container(job)
        here = {
            "/home/holdfast/.sshd_config": str(self.folder / "sshd_config"),
            "/etc/mpi/hostfile": str(self.folder / "hostfile"),
            "python": sys.executable,
            "16": str(NODES),
        }
        words = [here.get(word, word) for word in (*container["command"], *container["args"])]
        # The image has ssh's configuration below the home directory.
        return [re.sub(r"^ssh ", f"ssh -F {self.folder / 'ssh'} ", word) for word in words]

    def _wait_ready(self, pod: MpiPod) -> None:
        probe = [
            "ssh",
            "-F",
            str(self.folder / "ssh"),
            "-p",
            "2222",
            "-o",
            "StrictHostKeyChecking=no",
            pod.address,
        ]

        def answers() -> bool:
            assert pod.code() is None, self.output()
            return (
                subprocess.run([*probe, "true"], capture_output=True, check=False, timeout=30).returncode == 0
            )

        wait_until(answers, _SECONDS_MAX, f"{pod.name} does not become ready")


@contextlib.contextmanager
def played_mpi(folder: Path) -> Iterator[PlayedMpiJob]:
    """The pods of runtime-mpi.yaml, not yet started; all end with the block."""
    with running_network() as network:
        job = PlayedMpiJob(folder, network)
        try:
            yield job
        finally:
            for pod in job.pods:
                pod.remove()
