"""The hosts that a job may use: this machine, or those of a file, of Slurm, or of a cloud (cluster/fleet.py).

    Fleet.list_hosts() ─► reachable hosts with their slots ─► place_ranks(hosts, wanted) ─► number of ranks on each host

mpirun does not notice a host that has vanished, so the fleet checks: it asks the cloud, or tries to start `true` on the
host, as mpirun would.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

from holdfast.errors import ConfigError
from holdfast.net.address import Address

# Command that starts a command on a host; a replacement takes the same arguments: `AGENT HOST COMMAND`.
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
_LINE = re.compile(r"(?P<name>[A-Za-z0-9._:\-\[\]]+)(?P<rest>(\s+\S+)*)")
_SLOTS = re.compile(r"(?:slots|max[-_]slots)=(\d{1,6})")
_PROBE_SECONDS_MAX = 10.0
_PROBES_AT_ONCE = 32
_NODES_OF_JOB = re.compile(r"\bNodeList=([^\s()]+)")
_SLURM_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


class Host(NamedTuple):
    """A host for training ranks."""

    name: str
    slots: int


class Fleet(Protocol):
    """A source of hosts; `name` is for messages. A thread of its own calls `list_hosts`, which may take seconds."""

    name: str

    def list_hosts(self) -> tuple[Host, ...] | None:
        """Return the usable hosts; None: this machine. Raises `HoldfastError`: unknown now; the last answer counts."""

    def request_hosts(self, wanted: int) -> None:
        """Request hosts for this many more ranks. Called in the thread of `list_hosts`."""
        # Hostfiles and Slurm allocations do not grow: a hostfile is edited by a person.
        del wanted


class LocalFleet(Fleet):
    """Everything runs on this machine."""

    name = "this machine"

    def list_hosts(self) -> None:
        return None


class HostFile(Fleet):
    """The hosts of an mpirun hostfile, `name slots=8` on each line. Each call of `list_hosts` reads it again."""

    def __init__(self, path: Path, *, agent: Sequence[str] | None = None) -> None:
        self._path, self._agent = path, agent or SSH
        self.name = str(path)
        self.read()

    def read(self) -> tuple[Host, ...]:
        """Return the hosts in the file. Raises `ConfigError`: the file is unreadable, or a line names no host."""
        try:
            text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"hostfile {self._path}: the file cannot be read: {error}") from error
        found: dict[str, int] = {}
        for number, line in enumerate(text.splitlines(), 1):
            line = line.partition("#")[0].strip()
            if not line:
                continue
            match = _LINE.fullmatch(line)
            if match is None or line.startswith("-"):
                raise ConfigError(
                    f"hostfile {self._path}, line {number}: expected `name slots=8`, got {line!r}"
                )
            slots = _SLOTS.search(match["rest"])
            found[match["name"]] = found.get(match["name"], 0) + (int(slots[1]) if slots else 1)
        return tuple(Host(name, slots) for name, slots in found.items() if slots)

    def list_hosts(self) -> tuple[Host, ...]:
        hosts = self.read()
        with ThreadPoolExecutor(_PROBES_AT_ONCE, thread_name_prefix="probe") as probes:
            reachable = probes.map(self._is_reachable, (host.name for host in hosts))
        return tuple(itertools.compress(hosts, reachable))

    def _is_reachable(self, host: str) -> bool:
        if is_local_host(host):
            return True
        try:
            done = subprocess.run(
                [*self._agent, host, "true"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_PROBE_SECONDS_MAX,
                check=False,
            )
        except (subprocess.TimeoutExpired, OSError):
            return False
        return done.returncode == 0


class Slurm(Fleet):
    """The hosts of this Slurm job that are not down. Raises `ConfigError`: outside a Slurm job, or unreadable."""

    name = "the Slurm allocation"

    def __init__(
        self,
        environment: Mapping[str, str] = os.environ,
        scontrol: Callable[[Sequence[str]], str] | None = None,
    ) -> None:
        self._scontrol = scontrol or _scontrol
        nodes, job = environment.get("SLURM_JOB_NODELIST"), environment.get("SLURM_JOB_ID")
        if not nodes or not job:
            raise ConfigError(
                "--slurm: SLURM_JOB_ID or SLURM_JOB_NODELIST is not set; run this command inside sbatch or salloc"
            )
        self._job = job
        names = self._scontrol(["show", "hostnames", nodes]).split()
        tasks = _tasks(
            environment.get("SLURM_NTASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "1")
        )
        if len(tasks) == 1:
            tasks *= len(names)
        if not names or len(tasks) != len(names):
            raise ConfigError(
                f"--slurm: expected tasks for each of the {len(names)} nodes in {nodes!r}, got {len(tasks)} numbers; "
                "check SLURM_NTASKS_PER_NODE and SLURM_TASKS_PER_NODE"
            )
        self._hosts = tuple(Host(name, count) for name, count in zip(names, tasks, strict=True))

    def list_hosts(self) -> tuple[Host, ...]:
        """Return the nodes of the job that Slurm does not report as down, failing or powered off."""
        # With --no-kill a failed node leaves the job; after its repair it may belong to another job.
        job_nodes = _NODES_OF_JOB.search(self._scontrol(["show", "job", self._job, "--oneliner"]))
        if job_nodes is None:
            return ()
        names = self._scontrol(["show", "hostnames", job_nodes[1]]).split()
        states = _states(self._scontrol(["show", "node", ",".join(names), "--oneliner"]))
        bad = ("DOWN", "FAIL", "NOT_RESPONDING", "POWERED_DOWN", "POWERING_DOWN", "*")
        return tuple(
            h for h in self._hosts if h.name in states and not any(word in states[h.name] for word in bad)
        )


def _scontrol(arguments: Sequence[str]) -> str:
    if shutil.which("scontrol") is None:
        raise ConfigError(
            "--slurm: there is no `scontrol` on PATH; run this command on a node of the Slurm cluster"
        )
    try:
        return subprocess.run(
            ["scontrol", *arguments], capture_output=True, text=True, check=True, timeout=_PROBE_SECONDS_MAX
        ).stdout
    except (subprocess.SubprocessError, OSError) as error:
        raise ConfigError(f"scontrol {' '.join(arguments)}: {error}") from error


def _states(text: str) -> dict[str, str]:
    return dict(re.findall(r"NodeName=(\S+).*?State=(\S+)", text))


def _tasks(text: str) -> list[int]:
    """Parse tasks per node: `2(x3),1` is [2, 2, 2, 1]."""
    found: list[int] = []
    for part in text.split(","):
        match = _SLURM_TASKS.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"--slurm: expected tasks per node such as `2(x3),1`, got {text!r}")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def is_local_host(name: str) -> bool:
    """Whether `name` is this machine, without a DNS look-up."""
    own = socket.gethostname()
    return name in {own, own.partition(".")[0]} or Address(name.strip("[]"), 0).is_loopback


def place_ranks(hosts: Sequence[Host], wanted: int) -> tuple[Host, ...]:
    """Place `wanted` ranks, or as many as fit, on the hosts in order. In the result, `slots` is the number of ranks."""
    left, placed = wanted, []
    for host in hosts:
        taken = min(left, host.slots)
        if taken:
            placed.append(host._replace(slots=taken))
            left -= taken
    return tuple(placed)
