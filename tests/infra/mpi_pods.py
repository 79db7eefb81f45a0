"""The pods of Kubeflow's MPI runtime: each has network, processes, host name and /dev/shm of its own on this machine.

The commands are those of runtime-mpi.yaml, each as process 1 of its pod: when it ends, the kernel ends the pod. Played
are what Trainer adds (hostfile, keys, names) and the restart. Replaced are the number of ranks and the paths of mounts.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tests.hosts.host import Host
from tests.hosts.network import Network, command, running_network
from tests.infra.toolbox import INFRA
from tests.integration.jobs import in_a_pod
from tests.support.cluster import wait_until
from tests.support.job import environment

__all__ = ["PlayedMpiJob", "played_mpi"]

NODES = 2
_SECONDS_MAX = 120.0
_BOOT = """\
hostname "$1"; ip link set lo up; mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs tmpfs /run; mkdir /run/sshd /run/tmp
mount --bind "$2" /etc/hosts; cd "$3"; shift 3; exec "$@"
"""


class MpiPod(Host):
    """One pod; `start` begins its command."""

    def start(self, line: list[str], folder: Path, variables: dict[str, str]) -> None:
        self._make_wire()
        command("ip", "link", "set", self.wire, "up")
        with (folder / f"{self.name}.log").open("ab") as output:
            self._process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self._space),
                    *("unshare", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"),
                    *(
                        "sh",
                        "-ec",
                        _BOOT,
                        "sh",
                        self.name,
                        str(folder / "names"),
                        str(folder / "workspace"),
                        *line,
                    ),
                ],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=variables,
                start_new_session=True,
            )

    def code(self) -> int | None:
        """How its process 1 ended; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def terminate(self) -> None:
        """What the kubelet does first: SIGTERM to process 1 of the pod."""
        assert self._process is not None
        pid = self._process.pid
        (first,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)

    def kill_rank(self) -> None:
        """SIGKILL to the rank of this pod."""
        found = [pid for pid in self.pids() if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(found) == 1, found
        os.kill(found[0], signal.SIGKILL)


class PlayedMpiJob:
    """The JobSet of the runtime. Made by `played_mpi`; `pods` are those of the newest start."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.folder, self._network, self.pods, self.restarts = folder, network, list[MpiPod](), 0
        self.codes: list[list[int | None]] = []
        self._spec = yaml.safe_load((INFRA / "kubernetes" / "runtime-mpi.yaml").read_text())["spec"][
            "template"
        ]["spec"]
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
            # A pod's /tmp is its own, too; the folder of this test is below this machine's.
            "TMPDIR": "/run/tmp",
            # In the cluster mpirun is not root.
            **{
                f"{word}_ALLOW_RUN_AS_ROOT{end}": "1" for word in ("OMPI", "PRTE") for end in ("", "_CONFIRM")
            },
            "PRTE_MCA_plm_ssh_agent": f"ssh -F {folder / 'ssh'}",
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
        """The pods of the nodes, and the launcher's once they listen."""
        names = [f"holdfast-node-0-{index}" for index in range(NODES)]
        self.pods = [
            MpiPod(n, self._network, "1gbit", self.folder) for n in (*names, "holdfast-launcher-0-0")
        ]
        lines = [f"{pod.address} {pod.name} {pod.name}.holdfast\n" for pod in self.pods]
        (self.folder / "names").write_text("127.0.0.1 localhost\n" + "".join(lines))
        (self.folder / "hostfile").write_text("".join(f"{name}.holdfast slots=1\n" for name in names))
        for pod in self.pods[:-1]:
            pod.start(self._line("node"), self.folder, self._variables)
            self._wait_ready(pod)
        self.pods[-1].start(self._line("launcher"), self.folder, self._variables)

    def wait_for_ranks(self) -> None:
        """Until all ranks stand by in the middle of the run."""

        def ready() -> bool:
            assert all(pod.code() is None for pod in self.pods), self.output()
            return all((self.folder / "out" / f"ready-{rank}").exists() for rank in range(NODES))

        wait_until(ready, _SECONDS_MAX, f"the ranks do not come so far:\n{self.output()}")

    def settle(self) -> str:
        """Follow the pods until the launcher is done or a pod fails: "Completed", "RestartJobSet" or "FailJobSet"."""
        codes: list[int | None] = []

        def settled() -> bool:
            codes[:] = [pod.code() for pod in self.pods]
            return any(codes) or codes[-1] == 0

        wait_until(settled, _SECONDS_MAX, f"no pod ends:\n{self.output()}")
        self.codes.append(codes)
        self.stop()
        # JobSet looks for failed Jobs before it looks for success: mpirun's 0 does not count beside a lost node.
        if not any(codes):
            return "Completed"
        self.restarts += 1
        if self.restarts > self._spec["failurePolicy"]["maxRestarts"]:
            return "FailJobSet"
        self.start()
        return "RestartJobSet"

    def stop(self) -> None:
        """SIGTERM to the launcher with time to write what is staged, then the end of every pod."""
        if self.pods and self.pods[-1].pids() and self.pods[-1].code() is None:
            self.pods[-1].terminate()
            with contextlib.suppress(AssertionError):
                wait_until(lambda: self.pods[-1].code() is not None, 30, "the launcher stays")
        for pod in self.pods:
            pod.remove()
        self.pods = []

    def output(self) -> str:
        """What all pods have said."""
        return "\n".join(
            f"--- {log.name}\n{log.read_text()[-4000:]}" for log in sorted(self.folder.glob("*.log"))
        )

    def starts(self, rank: int) -> list[int]:
        """The first step of each start of a rank."""
        return [int(line) for line in (self.folder / "out" / f"start-{rank}").read_text().split()]

    def _line(self, job: str) -> list[str]:
        (found,) = (one for one in self._spec["replicatedJobs"] if one["name"] == job)
        (container,) = found["template"]["spec"]["template"]["spec"]["containers"]
        words: list[Any] = [*container["command"], *container["args"]]
        here = {
            "/home/holdfast/.sshd_config": str(self.folder / "sshd_config"),
            "/etc/mpi/hostfile": str(self.folder / "hostfile"),
            " python train.py": f" {shlex.quote(sys.executable)} train.py",
        }
        for old, new in here.items():
            words = [word.replace(old, new) for word in words]
        return [re.sub(r"-n 16\b", f"-n {NODES}", word) for word in words]

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
    """The pods of runtime-mpi.yaml; none runs yet, and none outlives the block."""
    with running_network() as network:
        job = PlayedMpiJob(folder, network)
        try:
            yield job
        finally:
            for pod in job.pods:
                pod.remove()
