"""Two hosts on one machine: this one, and a network namespace behind a wire that can be cut.

    this host 10.M.N.1 ───── veth ───── 10.M.N.2 namespace "spot", with a host name of its own

A cut wire looks like a vanished VM: no reset, no goodbye, packets are lost. mpirun starts its daemon in the namespace
through a launch agent that is a script, in place of ssh; all other traffic between the two goes over the wire.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

__all__ = ["TwoHosts", "two_hosts", "why_not"]

_AGENT = """#!/bin/sh
# Called as ssh would be: options, host, command.
while [ "${{1#-}}" != "$1" ]; do shift; done
shift
exec ip netns exec {name} unshare --uts sh -c "hostname {name}; $*"
"""


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def why_not() -> str:
    """Return why this machine cannot play two hosts, or ""."""
    if os.geteuid() != 0:
        return "making a network namespace needs root"
    for tool in ("ip", "unshare", "hostname"):
        if shutil.which(tool) is None:
            return f"no `{tool}` on PATH (packages iproute2, util-linux, hostname)"
    probe = f"hfp{os.getpid()}"
    made = _run("ip", "netns", "add", probe)
    if made.returncode == 0:
        wire = _run("ip", "link", "add", probe, "netns", probe, "type", "veth", "peer", "name", f"{probe}x")
        lives = _run("ip", "netns", "exec", probe, "unshare", "--uts", "true")
        _run("ip", "netns", "del", probe)
        made = wire if wire.returncode else lives
    return f"no network namespace can be made: {made.stderr.strip()}" if made.returncode else ""


class TwoHosts:
    """The namespace, and how to start a job on both. Made by `two_hosts`."""

    def __init__(self, directory: Path) -> None:
        pid = os.getpid()
        self.name = f"hfspot{pid}"
        self._here, self._there = f"hfw{pid}a", f"hfw{pid}b"
        self._network = f"10.{64 + pid // 250 % 64}.{pid % 250 + 1}"  # unlike the other workers'
        self._agent = directory / "agent"
        self._agent.write_text(_AGENT.format(name=self.name))
        self._agent.chmod(0o755)

    @property
    def here(self) -> str:
        """Address of this host."""
        return f"{self._network}.1"

    @property
    def there(self) -> str:
        """Address of the namespace."""
        return f"{self._network}.2"

    @property
    def wire(self) -> str:
        """Name of this host's end of the wire."""
        return self._here

    @property
    def mpirun_options(self) -> str:
        """Options that keep MPI on the wire."""
        network = f"{self._network}.0/24"
        return (
            f"--prtemca prte_if_include {network} --mca pml ob1 --mca btl tcp,self --mca btl_tcp_if_include "
            + network
        )

    def make(self) -> None:
        """Build namespace and wire."""
        inside = ("ip", "netns", "exec", self.name)
        for command in (
            ("ip", "netns", "add", self.name),
            ("ip", "link", "add", self._here, "type", "veth", "peer", "name", self._there),
            ("ip", "link", "set", self._there, "netns", self.name),
            ("ip", "addr", "add", f"{self._network}.1/24", "dev", self._here),
            ("ip", "link", "set", self._here, "up"),
            (*inside, "ip", "addr", "add", f"{self._network}.2/24", "dev", self._there),
            (*inside, "ip", "link", "set", self._there, "up"),
            (*inside, "ip", "link", "set", "lo", "up"),
        ):
            done = _run(*command)
            assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"

    def cut(self) -> None:
        """Cut the wire; neither side gets a notification."""
        done = _run("ip", "link", "set", self._here, "down")
        assert done.returncode == 0, done.stderr

    def pids(self) -> list[int]:
        """Processes in the namespace."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.name).stdout.split()]

    def remove(self) -> None:
        """Kill the processes in the namespace and remove it."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _run("ip", "link", "del", self._here)
        _run("ip", "netns", "del", self.name)

    def rewrite(self, command: list[str]) -> list[str]:
        """Return an mpirun line whose trainers run in the namespace, and whose stager runs here."""
        network = f"{self._network}.0/24"
        options = [
            *("--prtemca", "plm_ssh_agent", str(self._agent), "--prtemca", "prte_if_include", network),
            *("--mca", "pml", "ob1", "--mca", "btl_tcp_if_include", network),
        ]
        command = [*command]
        command[command.index("btl") + 1] = (
            "tcp,self"  # replaces the setting for one machine's job: mpirun accepts only one
        )
        split, first = command.index(":"), command.index("-n")
        ranks = command[first + 1]
        return [
            *(command[0], *options, *command[1:first], "--host", f"{self._network}.2:{ranks}"),
            *command[first : split + 1],
            *("--host", f"{self._network}.1:1", *command[split + 1 :]),
        ]


@contextlib.contextmanager
def two_hosts(directory: Path) -> Iterator[TwoHosts]:
    """Make the two hosts; remove them at the end."""
    hosts = TwoHosts(directory)
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()
