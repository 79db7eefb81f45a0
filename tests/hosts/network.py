"""The network between the hosts of a test: a bridge on this machine, with an address of its own for the store.

this machine 10.78.N.1 ── bridge ──┬── veth, shaped by tbf in both directions ── eth0 of a host, 10.78.N.10
                                   └── ...
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["SSHD", "Network", "command", "running_network", "why_not"]

SSHD = Path("/usr/sbin/sshd")
_TOOLS = ("ip", "tc", "unshare", "hostname", "mount", "setpriv", "ssh", "ssh-keygen")


def command(*words: str) -> str:
    """Run a command; return its output."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout


def why_not() -> str:
    """Return why this machine cannot play several hosts, or ""."""
    if os.geteuid() != 0:
        return "hosts of their own need root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if not SSHD.exists():
        missing.append("sshd")
    if missing:
        return f"no {', '.join(missing)} here (`make hosts` installs openssh-server, iproute2)"
    # Try all parts of a host in one that ends at once.
    script = "mount -t tmpfs tmpfs /mnt && tc qdisc add dev lo root tbf rate 1mbit burst 64kb latency 50ms"
    spaces = ("--net", "--mount", "--pid", "--fork", "--uts", "--mount-proc")
    tried = subprocess.run(
        ["unshare", *spaces, "sh", "-c", f"{script} && ip link add hfprobe type bridge"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    return f"no host can be made: {tried.stderr.strip()}" if tried.returncode else ""


class Network:
    """The bridge. Made by `running_network`."""

    def __init__(self, number: int) -> None:
        self.prefix = f"10.78.{number}"
        self.bridge = f"hfb{number}"
        self._last = 9

    @property
    def subnet(self) -> str:
        """The network's address range."""
        return f"{self.prefix}.0/24"

    @property
    def here(self) -> str:
        """Address of this machine, which runs the store."""
        return f"{self.prefix}.1"

    def new_address(self) -> str:
        """An address that no host of this network has had, so that a replacement is not taken for its predecessor."""
        self._last += 1
        assert self._last < 255, "too many hosts in one session"
        return f"{self.prefix}.{self._last}"


@contextlib.contextmanager
def running_network() -> Iterator[Network]:
    """A network that no other process on this machine uses; removed at the end.

    Its number is locked while this process lives. Leftovers of a killed run with that number are removed first.
    """
    with contextlib.ExitStack() as stack:
        for number in range(1, 251):
            lock = stack.enter_context((Path(tempfile.gettempdir()) / f"holdfast-hosts-{number}").open("w"))
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
        else:
            raise AssertionError("250 networks of hosts are there already")
        network = Network(number)
        _remove(network)
        stack.callback(_remove, network)
        # Without an address of its own a bridge takes the lowest one of its ports: booting a host may change it, and
        # peers would send to the old one for a minute.
        command(
            "ip", "link", "add", network.bridge, "address", f"02:68:66:00:00:{number:02x}", "type", "bridge"
        )
        command("ip", "addr", "add", f"{network.here}/24", "dev", network.bridge)
        command("ip", "link", "set", network.bridge, "up")
        yield network


def _remove(network: Network) -> None:
    for line in command("ip", "netns").splitlines():
        name = line.split()[0]
        if name.startswith(f"{network.bridge}-"):
            for pid in command("ip", "netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            command("ip", "netns", "del", name)
    names = [line.split()[0].partition("@")[0] for line in command("ip", "-br", "link").splitlines()]
    for name in names:
        if name == network.bridge or name.startswith(f"{network.bridge}n"):
            subprocess.run(["ip", "link", "del", name], capture_output=True, check=False, timeout=30)
