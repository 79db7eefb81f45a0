"""Bytes from two ranks into the ring: holdfast's TCP against bare sockets of as many connections, TLS, and MPI.

The stager's end and the ranks are processes of their own (benchmarks/raw_tcp.py), with chunks of 16 MiB and two
connections for each rank; the ways take turns within a round. TLS is one of them where there is `openssl`, which makes
its certificate. MPI uses TCP too (`--mca btl tcp,self`): its
shared memory would say nothing about a network. Where root has `ip` and `tc`, TCP is measured a second time over a link
between two network namespaces that tbf limits to 2 Gb/s.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.experiments import EXPERIMENTS, Options, command_of
from benchmarks.grid import Grid
from benchmarks.raw_tcp import CERT, CERT_KEY, CONNECTIONS, RANKS
from benchmarks.spread import Spread, columns, ratios, spread
from holdfast.mpirun import mpirun_command

__all__ = ["BARE", "MPI", "TCP", "TLS", "bandwidth", "cpu", "grids", "measure", "of_link"]

TCP, TLS, BARE, MPI = "holdfast over TCP", "holdfast over TCP with TLS", "bare sockets", "holdfast over MPI"
_WAYS = {TCP: "tcp", TLS: "tls", BARE: "bare", MPI: "mpi"}
_ROUNDS = 5
_CHUNK_BYTES = 16 << 20
_CHUNKS, _CHUNKS_QUICK, _CHUNKS_LINK = 96, 4, 24  # per rank
_LINK_BITS = 2_000_000_000
_BURST_BYTES = 256 * 1024
_SECONDS_MAX = 300.0
_JOB = (sys.executable, "-m", "benchmarks.raw_tcp")


def measure(options: Options) -> dict[str, Any]:
    chunks = options.count(_CHUNKS, _CHUNKS_QUICK)
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(options.rounds_of(_ROUNDS)):
        ways = [way for way in _WAYS if way != TLS or shutil.which("openssl")]
        of_round = {}
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            options.progress(f"round {number + 1}: {way}")
            of_round[way] = _play(_WAYS[way], chunks, options.folder)
        rounds.append(of_round)
    link: list[dict[str, float]] = []
    with contextlib.ExitStack() as stack:
        if _can_shape():
            hosts = stack.enter_context(_link())
            for number in range(options.rounds_of(3)):
                options.progress(f"link of 2 Gb/s, round {number + 1}")
                link.append(_play("tcp", options.count(_CHUNKS_LINK, 1), options.folder, hosts))
    return {
        "experiment": "transport",
        "what": EXPERIMENTS["transport"],
        "command": command_of("transport", options),
        "quick": options.quick,
        "machine": machine.describe(options.folder or Path("/tmp")),
        "measured": machine.measured(),
        "shape": {
            "model": "bare chunks",
            "ranks": RANKS,
            "connections": CONNECTIONS,
            "chunk_bytes": _CHUNK_BYTES,
        },
        "rounds": rounds,
        "link": link,
        "link_bits": _LINK_BITS,
    }


class _Hosts:
    """Hosts of the two ends: the prefix of each one's command, and the stager's address."""

    def __init__(
        self, stager: Sequence[str] = (), ranks: Sequence[str] = (), address: str = "127.0.0.1"
    ) -> None:
        self.stager, self.ranks, self.address = list(stager), list(ranks), address


def _play(way: str, chunks: int, folder: Path | None, hosts: _Hosts | None = None) -> dict[str, float]:
    """Run one way once, in separate processes.

    Raises:
        RuntimeError: A process failed.
    """
    hosts = hosts or _Hosts()
    with tempfile.TemporaryDirectory(prefix="holdfast-transport-", dir=folder) as place:
        arguments = [
            *("--place", place, "--host", hosts.address),
            *("--chunks", str(chunks), "--chunk-bytes", str(_CHUNK_BYTES)),
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if way == "tls":
            _certify(Path(place), hosts.address)
        if way == "mpi":
            job = [*_JOB, way]
            commands = [
                mpirun_command(
                    RANKS,
                    [*job, "rank", *arguments],
                    stager=[*job, "stager", *arguments],
                    options=["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"],
                )
            ]
        else:
            commands = [[*hosts.stager, *_JOB, way, "stager", *arguments]] + [
                [*hosts.ranks, *_JOB, way, "rank", "--rank", str(rank), *arguments] for rank in range(RANKS)
            ]
        processes = [
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for command in commands
        ]
        try:
            said = [process.communicate(timeout=_SECONDS_MAX) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for told in said[0][0].splitlines():
            if told.startswith("{"):
                return {name: float(value) for name, value in json.loads(told).items()}
        raise RuntimeError(f"{way}: {said}")


def _certify(place: Path, address: str) -> None:
    """Make a self-signed certificate for this address, and its private key."""
    made = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    named = ("-subj", "/CN=holdfast", "-addext", f"subjectAltName=IP:{address}")
    _run(
        "openssl", "req", "-x509", *made, *named, "-keyout", str(place / CERT_KEY), "-out", str(place / CERT)
    )


def _can_shape() -> bool:
    return os.geteuid() == 0 and all(shutil.which(program) for program in ("ip", "tc"))


@contextlib.contextmanager
def _link() -> Iterator[_Hosts]:
    """Make two network namespaces with a shaped link between them, and remove them after the block."""
    names = [f"holdfast-bench-{end}-{os.getpid()}" for end in ("stager", "ranks")]
    devices = [f"hfb{end}{os.getpid()}" for end in "sr"]
    addresses = ("10.79.0.1", "10.79.0.2")
    with contextlib.ExitStack() as stack:
        for name in names:
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "delete", name)
        _run("ip", "link", "add", devices[0], "type", "veth", "peer", "name", devices[1])
        for name, device, address in zip(names, devices, addresses, strict=True):
            _run("ip", "link", "set", device, "netns", name)
            inside = ("ip", "netns", "exec", name)
            _run(*inside, "ip", "addr", "add", f"{address}/24", "dev", device)
            _run(*inside, "ip", "link", "set", device, "up")
            shape = ("root", "tbf", "rate", f"{_LINK_BITS}bit", "burst", str(_BURST_BYTES), "latency", "50ms")
            _run(*inside, "tc", "qdisc", "add", "dev", device, *shape)
        yield _Hosts(("ip", "netns", "exec", names[0]), ("ip", "netns", "exec", names[1]), addresses[0])


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def bandwidth(document: Mapping[str, Any]) -> Spread:
    """Return holdfast's bandwidth over TCP as a ratio to that of bare sockets, by round."""
    rounds = document["rounds"]
    return ratios(columns(rounds, BARE, "seconds"), columns(rounds, TCP, "seconds"))


def cpu(document: Mapping[str, Any]) -> Spread:
    """Return the CPU time of the stager's end over TCP as a ratio to that over MPI."""
    rounds = document["rounds"]
    return ratios(columns(rounds, TCP, "cpu_seconds"), columns(rounds, MPI, "cpu_seconds"))


def of_link(document: Mapping[str, Any]) -> Spread | None:
    """Return the used share of the shaped link, None if it was not measured."""
    shares = [of["nbytes"] * 8 / of["seconds"] / document["link_bits"] for of in document["link"]]
    return spread(shares) if shares else None


def grids(document: dict[str, Any]) -> list[Grid]:
    rounds = document["rounds"]
    rows = []
    for way in [way for way in _WAYS if way in rounds[0]]:  # older documents have no row for TLS
        speeds = [of[way]["nbytes"] / of[way]["seconds"] / 1e9 for of in rounds]
        costs = [of[way]["cpu_seconds"] / (of[way]["nbytes"] / 1e9) for of in rounds]
        rows.append((way, spread(speeds).text(2), spread(costs).text(3)))
    title = "Two ranks into the slots of one ring, on this machine"
    found = [Grid(title, ("way", "GB/s", "CPU s/GB of the stager's end"), tuple(rows))]
    share = of_link(document)
    if share is not None:
        row = ("holdfast over TCP", share.text(1, times=100))
        found.append(Grid("Over a link of 2 Gb/s", ("way", "% of the link"), (row,)))
    return found
