"""A pod with network, processes, host name and /dev/shm of its own on this machine; its command is process 1."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.hosts.host import Host
from tests.hosts.network import command

__all__ = ["PodHost"]

_BOOT = """\
hostname "$1"; ip link set lo up; mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs tmpfs /run; mkdir /run/sshd /run/tmp
mount --bind "$2" /etc/hosts; cd "$3"; shift 3; exec "$@"
"""


class PodHost(Host):
    """One pod; `start` runs its command. When process 1 ends, the kernel ends the pod."""

    def start(
        self, line: Sequence[str], *, names: Path, place: Path, log: Path, variables: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start the command; return a process with the exit code of the pod's process 1.

        Args:
            line: The command.
            names: The pod's /etc/hosts.
            place: Its working directory.
            log: File for its output.
            variables: Its environment.
        """
        self._make_wire()
        command("ip", "link", "set", self.wire, "up")
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self._space),
                    *("unshare", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"),
                    *("sh", "-ec", _BOOT, "sh", self.name, str(names), str(place), *line),
                ],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=dict(variables),
                start_new_session=True,
            )
        return self._process

    def code(self) -> int | None:
        """Exit code of process 1; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def terminate(self) -> None:
        """SIGTERM process 1 of the pod, as the kubelet does after the preStop hook."""
        os.kill(self.first(), signal.SIGTERM)

    def first(self) -> int:
        """Process 1 of the pod, by its pid on this machine."""
        assert self._process is not None
        pid = self._process.pid
        (first,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(first)
