"""A job whose ranks, and the stager beside them, are each in a network namespace with a link of a given width.

    rank 0 ── eth0, tbf ──┐
    rank 1 ── eth0, tbf ──┼── bridge ── tbf ── eth0 ── stager, flusher
    ...                   ┘

A rank's link is shaped towards the stager, the stager's where all of them come together. Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.jobs import Job, StandingStager, started

__all__ = ["Links", "ShapedJob", "why_not"]

_BURST_BYTES = 64 << 10
_END_SECONDS_MAX = 60.0
_STAGER = "10.79.1.1"
_MASTER_PORT = "29500"  # in a namespace of its own nobody else has it


@dataclass(frozen=True)
class Links:
    """Bits a second: of each rank's link, and of the stager's."""

    rank_bits: int
    stager_bits: int


def why_not() -> str:
    """Why this machine cannot shape links; empty if it can."""
    if os.geteuid() != 0:
        return "links are shaped by root"
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    return f"there is no {' and no '.join(missing)} (Debian: iproute2)" if missing else ""


class ShapedJob(Job):
    """Arguments as of `Job`, and the links."""

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
    ) -> None:
        self.log = folder / f"{name}.log"
        self._prefix = f"hfb{os.getpid() % 100_000}"
        self._stack = contextlib.ExitStack()
        self._ranks: list[subprocess.Popen[bytes]] = []
        with contextlib.ExitStack() as failing:
            failing.callback(self._stack.close)
            _run("ip", "link", "add", self._prefix, "type", "bridge")
            self._stack.callback(_run, "ip", "link", "delete", self._prefix)
            _run("ip", "link", "set", self._prefix, "up")
            inside = self._space("s", _STAGER)
            self.widen(links.stager_bits)
            stager = StandingStager(last, environment, folder, listen=_STAGER, inside=inside)
            self._stager = self._stack.enter_context(stager)
            for rank in range(ranks):
                inside = self._space(f"r{rank}", f"10.79.1.{rank + 10}", links.rank_bits)
                own = {
                    **environment,
                    **self._stager.joining,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "10.79.1.10",
                    "MASTER_PORT": _MASTER_PORT,
                    "GLOO_SOCKET_IFNAME": "eth0",
                }
                log = self.log if rank == 0 else folder / f"{name}-{rank}.log"
                self._ranks.append(started([*inside, sys.executable, *trainer], own, log))
            failing.pop_all()
        self._process = self._ranks[0]

    def widen(self, stager_bits: int) -> None:
        """Give the stager's link this width from now on."""
        _shape(f"{self._prefix}s", stager_bits)

    def _space(self, name: str, address: str, bits: int = 0) -> list[str]:
        """Make a namespace with that address; what a command in it begins with."""
        space, wire = f"holdfast-bench-{os.getpid()}-{name}", f"{self._prefix}{name}"
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
        """As `Job`."""
        return self._stager.process.pid if word == "stager" else super().find(word)

    def pids(self) -> list[int]:
        """As `Job`."""
        return [self._stager.process.pid, *(rank.pid for rank in self._ranks)]

    @property
    def ended(self) -> bool:
        """Whether a rank is gone."""
        return any(rank.poll() is not None for rank in self._ranks)

    def end(self) -> int:
        """As `Job`; the stager ends after it."""
        deadline = time.monotonic() + _END_SECONDS_MAX
        codes = [rank.wait(max(0.0, deadline - time.monotonic())) for rank in self._ranks]
        self._stager.end()
        return max(map(abs, codes))

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
        self._stack.close()


def _shape(device: str, bits: int, inside: Sequence[str] = ()) -> None:
    shape = ("root", "tbf", "rate", f"{bits}bit", "burst", str(_BURST_BYTES), "latency", "50ms")
    _run(*inside, "tc", "qdisc", "replace", "dev", device, *shape)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
