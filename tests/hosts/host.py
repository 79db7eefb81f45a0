"""One host: a network namespace with its own address and name, its own processes, memory, disk, sshd, metadata service.

boot.sh is process 1 of a PID namespace. Killing it works like cutting the power: the kernel ends all processes in the
namespace, and its private /dev/shm, /run and /mnt are lost.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.hosts.network import Network, command
from tests.support.cluster import wait_until
from tests.support.job import REPOSITORY

__all__ = ["Host"]

_BOOT = Path(__file__).with_name("boot.sh")
_BOOT_SECONDS_MAX = 60.0
_BURST_BYTES = 64 << 10


class Host:
    """A simulated machine, down until `boot`.

    Args:
        name: Its host name.
        network: Its network.
        rate: Its link's, in both directions, in tc's notation.
        directory: Files of its image: keys, settings of sshd.
    """

    def __init__(self, name: str, network: Network, rate: str, directory: Path) -> None:
        self.name, self._network, self._rate, self._directory = name, network, rate, directory
        self.address = network.new_address()
        number = self.address.rpartition(".")[2]
        self._space = f"{network.bridge}-{number}"
        self.wire = f"{network.bridge}n{number}"
        self._process: subprocess.Popen[bytes] | None = None
        self._made = False

    # -- events

    def boot(self) -> None:
        """Boot, empty; `ready` waits until the host answers."""
        assert not self.pids(), f"{self.name} is up already"
        if not self._made:
            self._make_wire()
        command("ip", "link", "set", self.wire, "up")
        arguments = (self.name, self.address, str(self._directory), sys.executable)
        with (self._directory / f"console-{self.name}").open("ab") as console:
            self._process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL"),  # a killed test run leaves no host behind
                    *("ip", "netns", "exec", self._space),
                    *("unshare", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"),
                    *("sh", str(_BOOT), *arguments),
                ],
                stdin=subprocess.PIPE,
                stdout=console,
                stderr=console,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                start_new_session=True,
            )

    def ready(self, ssh: list[str]) -> None:
        """Wait until ssh logins work."""

        def answers() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, (self._directory / f"console-{self.name}").read_text()
            return subprocess.run([*ssh, self.name, "true"], capture_output=True, check=False).returncode == 0

        wait_until(answers, _BOOT_SECONDS_MAX, f"{self.name} does not come up")

    def notice(self, seconds: float) -> None:
        """Announce at the metadata service that the host will be preempted in this many seconds."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"interrupt {seconds:g}\n".encode())
        self._process.stdin.flush()

    def vanish(self) -> None:
        """Take the link down. The processes keep running; neither they nor others are notified."""
        command("ip", "link", "set", self.wire, "down")

    def come_back(self) -> None:
        """Bring the link up again."""
        command("ip", "link", "set", self.wire, "up")

    def kill(self) -> None:
        """Cut the power: no packet is sent, no process survives, memory and disk are empty."""
        if self._made:
            self.vanish()
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait(30)
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process = None
        wait_until(lambda: not self.pids(), 30, lambda: f"{self.name} still has {self.pids()}")

    def remove(self) -> None:
        """Remove the host entirely."""
        self.kill()
        if self._made:
            command("ip", "link", "del", self.wire)  # at once; the kernel removes the namespace later
            command("ip", "netns", "del", self._space)
            self._made = False

    # -- contents

    def pids(self) -> list[int]:
        """The host's processes, by their pid on this machine."""
        if not self._made:
            return []
        return [int(pid) for pid in command("ip", "netns", "pids", self._space).split()]

    def commands(self) -> list[str]:
        """The host's processes, except boot processes and logins."""
        found = []
        for pid in self.pids():
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if line and not any(word in line for word in ("boot.sh", "fake_metadata", "sshd")):
                found.append(f"{self.name} {pid}: {line}")
        return found

    def file(self, path: str) -> Path:
        """A path of this host, readable from outside."""
        assert self._process is not None
        child = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()[0]
        return Path(f"/proc/{child}/root{path}")

    def _make_wire(self) -> None:
        inside = ("ip", "netns", "exec", self._space)
        shape = ("root", "tbf", "rate", self._rate, "burst", str(_BURST_BYTES), "latency", "50ms")
        command("ip", "netns", "add", self._space)
        self._made = True
        command("ip", "link", "add", self.wire, "type", "veth", "peer", "name", "eth0", "netns", self._space)
        command("ip", "link", "set", self.wire, "master", self._network.bridge)
        command(*inside, "ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        command(*inside, "ip", "link", "set", "eth0", "up")
        command(*inside, "tc", "qdisc", "add", "dev", "eth0", *shape)
        command("tc", "qdisc", "add", "dev", self.wire, *shape)
