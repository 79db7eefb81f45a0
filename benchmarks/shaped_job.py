"""A job with each rank and each stager in its own network namespace, behind a link of a given bandwidth.

    rank 0 ── eth0, tbf ──┐         ┌── tbf ── eth0 ── stager 1/S, flusher
    rank 1 ── eth0, tbf ──┼── bridge┤
    ...                   ┘         └── tbf ── eth0 ── stager S/S, flusher

A rank's link is shaped towards the stagers, a stager's link where the ranks' bytes come together. Without stagers,
rank 0 starts one: then the link towards rank 0 has a stager's bandwidth. Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.jobs import Job, StandingStager, started
from holdfast.net.key import new_key

__all__ = ["Links", "ShapedJob", "why_not"]

_BURST_BYTES = 64 << 10
_END_SECONDS_MAX = 60.0
_NETWORK = "10.79.1"  # each job has its own bridge, isolated from all other networks
_FIRST_STAGER, _FIRST_RANK = 1, 10
_MASTER_PORT = "29500"  # always free in a new namespace
_NUMBERS = itertools.count()  # several jobs of this process may have links at the same time


@dataclass(frozen=True)
class Links:
    """Bandwidths of a job's links.

    Attributes:
        rank_bits: Bits a second of each rank's link.
        stager_bits: Bits a second of each stager's link.
        stagers: Number of stagers that share each image, at most 9. 0: rank 0 starts its own.
    """

    rank_bits: int
    stager_bits: int
    stagers: int = 1


def why_not() -> str:
    """Return why this machine cannot shape links, or ""."""
    if os.geteuid() != 0:
        return "links are shaped by root"
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    return f"there is no {' and no '.join(missing)} (Debian: iproute2)" if missing else ""


class ShapedJob(Job):
    """Takes the arguments of `Job`, the links, and the store of rank 0's own stager."""

    def __init__(
        self,
        name: str,
        ranks: int,
        trainer: Sequence[str],
        last: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: Path,
        links: Links,
        store: str,
    ) -> None:
        self.log, number = folder / f"{name}.log", next(_NUMBERS)
        # A device's name has at most 15 characters.
        self._prefix = f"hf{os.getpid() % 100_000}x{number % 100}"
        self._spaces = f"holdfast-bench-{os.getpid()}-{number}"
        self._stack = contextlib.ExitStack()
        self._stagers: list[StandingStager] = []
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._towards_stagers: list[str] = []
        with contextlib.ExitStack() as failing:
            failing.callback(self._stack.close)
            _run("ip", "link", "add", self._prefix, "type", "bridge")
            self._stack.callback(_run, "ip", "link", "delete", self._prefix)
            _run("ip", "link", "set", self._prefix, "up")
            inside = [self._space(f"r{rank}", _rank(rank), links.rank_bits) for rank in range(ranks)]
            if links.stagers:
                joining = self._begin(links.stagers, last, environment, folder)
            else:
                self._towards_stagers.append(f"{self._prefix}r0")
                # The ranks share a host name, so rank 0 would take them for ranks of its own machine.
                listen = f"{_rank(0)}:0"
                joining = {"HOLDFAST_STAGER": "own", "HOLDFAST_STORE": store, "HOLDFAST_LISTEN": listen}
            self.widen(links.stager_bits)
            for rank in range(ranks):
                own = {
                    **environment,
                    **joining,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": _rank(0),
                    "MASTER_PORT": _MASTER_PORT,
                    "GLOO_SOCKET_IFNAME": "eth0",
                }
                log = self.log if rank == 0 else folder / f"{name}-{rank}.log"
                self._ranks.append(started([*inside[rank], sys.executable, *trainer], own, log))
            failing.pop_all()
        self._process = self._ranks[0]

    def _begin(
        self, count: int, command: Sequence[str], environment: Mapping[str, str], folder: Path
    ) -> dict[str, str]:
        """Start the stagers, each with its share; return the ranks' environment for joining them."""
        key = new_key()
        for index in range(count):
            address, name = f"{_NETWORK}.{_FIRST_STAGER + index}", f"s{index}"
            stager = StandingStager(
                [*command, "--share", f"{index + 1}/{count}"] if count > 1 else command,
                environment,
                folder,
                listen=address,
                inside=self._space(name, address),
                key=key,
                name=f"stager-{index + 1}",
            )
            self._stagers.append(self._stack.enter_context(stager))
            self._towards_stagers.append(self._prefix + name)
        return {
            "HOLDFAST_STAGER": ",".join(stager.address for stager in self._stagers),
            "HOLDFAST_KEY": key,
        }

    def widen(self, stager_bits: int) -> None:
        """Set the bandwidth of each stager's link."""
        for device in self._towards_stagers:
            _shape(device, stager_bits)

    def _space(self, name: str, address: str, bits: int = 0) -> list[str]:
        """Make a namespace with that address; return the prefix of commands that run in it."""
        space, wire = f"{self._spaces}-{name}", f"{self._prefix}{name}"
        _run("ip", "netns", "add", space)
        self._stack.callback(_run, "ip", "netns", "delete", space)
        _run("ip", "link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", space)
        self._stack.callback(_run, "ip", "link", "delete", wire)
        _run("ip", "link", "set", wire, "master", self._prefix, "up")
        inside = ["ip", "netns", "exec", space]
        _run(*inside, "ip", "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run(*inside, "ip", "link", "set", device, "up")
        if bits:
            _shape("eth0", bits, inside)
        return inside

    def find(self, word: str) -> int:
        """As `Job.find`; with several stagers, the first."""
        if word == "stager" and self._stagers:
            return self._stagers[0].process.pid
        return super().find(word)

    def pids(self) -> list[int]:
        found = []
        for begun in (*(stager.process.pid for stager in self._stagers), *(rank.pid for rank in self._ranks)):
            found.append(begun)
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [child.pid for child in psutil.Process(begun).children(recursive=True)]
        return found

    @property
    def ended(self) -> bool:
        """Whether a rank has exited."""
        return any(rank.poll() is not None for rank in self._ranks)

    def end(self) -> int:
        """As `Job.end`; the stagers end after the ranks."""
        deadline = time.monotonic() + _END_SECONDS_MAX
        codes = [rank.wait(max(0.0, deadline - time.monotonic())) for rank in self._ranks]
        for stager in self._stagers:
            stager.end()
        return max(map(abs, codes))

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
        self._stack.close()


def _rank(number: int) -> str:
    """Return a rank's address."""
    return f"{_NETWORK}.{_FIRST_RANK + number}"


def _shape(device: str, bits: int, inside: Sequence[str] = ()) -> None:
    shape = ("root", "tbf", "rate", f"{bits}bit", "burst", str(_BURST_BYTES), "latency", "50ms")
    _run(*inside, "tc", "qdisc", "replace", "dev", device, *shape)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
