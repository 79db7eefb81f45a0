"""A cluster of a stager's host and trainers' hosts, in which `holdfast run` starts jobs over ssh, as a user would.

cluster.run(3) ─► ssh stager: holdfast run --hosts … ─► mpirun ─► ssh t1, t2, t3: daemons ─► ranks
cluster.kill("t2"), .vanish("t2"), .notice("t2", seconds=20)
cluster.offer("t1", "t3", "t4")     writes the hosts file, as a tool that replaces machines would
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import job
from tests.hosts.host import Host
from tests.hosts.network import Network, command
from tests.support.cluster import wait_until
from tests.support.job import REPOSITORY
from tests.support.s3_place import S3Place, plain_client

__all__ = ["EVERY", "PAUSE_AT", "RING", "STAGER", "STEPS", "Cluster", "cluster_of"]

STEPS, EVERY, PAUSE_AT = 20, 4, 10
RING = "the stager's ring"  # the restore's name for it
STAGER = "stager"
_SECONDS_MAX = 270.0

_SSH = """\
Host *
User root
IdentityFile {directory}/key
IdentitiesOnly yes
UserKnownHostsFile {directory}/known_hosts
GlobalKnownHostsFile /dev/null
BatchMode yes
ConnectTimeout 5
LogLevel ERROR
"""

_SSHD = """\
HostKey {directory}/host-{name}
AuthorizedKeysFile {directory}/key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
PidFile none
MaxStartups 100
SetEnv {environment}
"""


class Cluster:
    """Hosts and the run on them. Made by `cluster_of`.

    Args:
        directory: For keys, logs and the ranks' output; stands for an observer's machine.
        network: The hosts' network.
        place: The store; None: a folder that all hosts share.
        trainers: Trainers' hosts t1, t2, … that are up from the start.
        spares: Further names; their hosts are up after `boot`.
        rate: Each link's.
    """

    def __init__(
        self,
        directory: Path,
        network: Network,
        place: S3Place | None,
        *,
        trainers: int,
        spares: int,
        rate: str,
    ) -> None:
        self.directory, self.rate = directory, rate
        self.store = str(directory / "store") if place is None else place.url()
        self._network, self._place = network, place
        self._first = [f"t{number + 1}" for number in range(trainers)]
        names = [STAGER, *(f"t{number + 1}" for number in range(trainers + spares))]
        self._hosts = {name: Host(name, network, rate, directory) for name in names}
        self.ssh = ["ssh", "-F", str(directory / "ssh")]
        self._runs: list[subprocess.Popen[bytes]] = []
        self.struck_at_unix, self.struck_step = 0.0, 0

    # -- hosts

    def host(self, name: str) -> Host:
        """The host of this name."""
        return self._hosts[name]

    def boot(self, *names: str) -> None:
        """Boot these hosts, empty and reachable."""
        for name in names:
            self.host(name).boot()
        for name in names:
            self.host(name).ready(self.ssh)

    def notice(self, name: str, seconds: float) -> None:
        """Announce, as the cloud does, that this host will be preempted."""
        self.host(name).notice(seconds)

    def kill(self, *names: str) -> None:
        """Cut the power of these hosts now."""
        self._strike()
        for name in names:
            self.host(name).kill()

    def vanish(self, name: str) -> None:
        """Make this host unreachable; it keeps running."""
        self._strike()
        self.host(name).vanish()

    def offer(self, *names: str) -> None:
        """Write the hosts file: one rank on each host."""
        text = "".join(f"{name} slots=1\n" for name in names)
        fresh = self.directory / "hosts.new"
        fresh.write_text(text)
        fresh.rename(self.directory / "hosts")

    def _strike(self) -> None:
        """Record the time, and how many steps were done by then."""
        self.struck_step = len((self.out(1) / "losses-0").read_text().splitlines())
        self.struck_at_unix = time.time()

    # -- the run

    def run(self, ranks: int, ranks_min: int | None = None, *, pace_seconds: float = 0.0) -> None:
        """`holdfast run` on the stager's host, with the job of these tests.

        Its first attempt pauses (`until_paused`), or has a pace, so that a fault may hit it anywhere.
        """
        options = {
            "--ranks": ranks,
            "--min-ranks": ranks if ranks_min is None else ranks_min,
            "--store": self.store,
            "--hosts": self.directory / "hosts",
            "--agent": shlex.join(self.ssh),
            "--stager-host": STAGER,
            "--mpirun-options": "--prtemca prte_if_include eth0 --mca pml ob1 --mca btl tcp,self "
            "--mca btl_tcp_if_include eth0",
            "--poll-seconds": 5,
            "--silent-seconds-max": 2,
            "--logs": self.directory / "logs",
        }
        settings = {"rank_seconds_max": 10, "chunk_bytes": "256KiB", "ring_bytes": "32MiB", "keep_last": 0}
        line = [sys.executable, "-m", "holdfast", "run"]
        line += [word for name, value in options.items() for word in (name, str(value))]
        line += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        first = (pace_seconds, -1) if pace_seconds else (0, PAUSE_AT)
        words = (job.__file__, self.directory, STEPS, EVERY, *first)
        line += ["--", sys.executable, *map(str, words)]
        with (self.directory / "said").open("ab") as said:
            self._runs.append(
                subprocess.Popen(
                    [*self.ssh, STAGER, f"exec {shlex.join(line)}"],
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    start_new_session=True,
                )
            )

    def wait(self) -> int:
        """Exit code of the newest `holdfast run`."""
        try:
            return self._runs[-1].wait(_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it did not end:\n{self.story()}")

    def done(self) -> None:
        """Check that the run ends with 0."""
        assert self.wait() == 0, self.story()

    def until(self, event: str, **fields: Any) -> dict[str, Any]:
        """Wait until status or events have such a line; return the newest one."""
        found: list[dict[str, Any]] = []

        def there() -> bool:
            found[:] = [
                line
                for line in (*self.status(event), *self.events(event))
                if all(line.get(name) == value for name, value in fields.items())
            ]
            assert found or self._runs[-1].poll() is None, self.story()
            return bool(found)

        wait_until(there, _SECONDS_MAX, lambda: f"no {event} {fields}:\n{self.story()}")
        return found[-1]

    def until_paused(self) -> None:
        """Wait until the first attempt pauses, some steps after a durable step."""
        self.until("durable", step=PAUSE_AT // EVERY * EVERY - 1)
        wait_until((self.out(1) / "paused-0").exists, _SECONDS_MAX, lambda: f"no pause:\n{self.story()}")

    def status(self, event: str = "") -> list[dict[str, Any]]:
        """Decisions of the supervisor, from its status file."""
        return _lines(self.directory / "logs" / "status.jsonl", event)

    def events(self, event: str = "") -> list[dict[str, Any]]:
        """Events of stager and flusher."""
        return _lines(self.directory / "logs" / "events.jsonl", event)

    def restored_from(self) -> list[set[str]]:
        """The sources that each rank of each attempt has restored from."""
        return [set(line["sources"]) for line in _lines(self.directory / "trainers.jsonl", "restore")]

    def story(self) -> str:
        """Logs and status, for the message of a failed test."""
        said = self.directory / "said"
        status = "\n".join(map(str, self.status()))
        return f"{said.read_text(errors='replace')[-6000:] if said.exists() else ''}\n{status}"

    def out(self, attempt: int) -> Path:
        """Folder with the ranks' output of an attempt."""
        return self.directory / f"cluster-{attempt}"

    # -- afterwards

    def assert_nothing_left(self, *but: str) -> None:
        """Check that running hosts (except `but`) have no process, ring or segment, and the store no upload."""
        hosts = [host for name, host in self._hosts.items() if name not in but and host.pids()]

        def left() -> list[str]:
            return [line for host in hosts for line in (*host.commands(), *_files(host, "/dev/shm"))]

        wait_until(lambda: not left(), 60, lambda: f"left behind: {left()}")
        if self._place is None:
            return
        client = plain_client()
        try:
            uploads = client.list_multipart_uploads(Bucket=self._place.bucket).get("Uploads", [])
            listed = client.list_objects_v2(Bucket=self._place.bucket).get("Contents", [])
        finally:
            client.close()
        assert not uploads
        assert not [item["Key"] for item in listed if "/tmp/" in item["Key"]]

    # -- set up and torn down

    def make(self) -> None:
        """Write keys and settings, then boot all hosts but the spares."""
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "HOME": "/mnt/home",  # hosts must not read the shell's files of this machine's user
            "TMPDIR": "/mnt/tmp",
            "XDG_STATE_HOME": "/mnt/state",
            "OMP_NUM_THREADS": "1",
            "HOLDFAST_WATCH": "aws",
            "HOLDFAST_WATCH_SECONDS": "1",
            "HOLDFAST_STAGER_SECONDS_MAX": "10",
            **(self._place.environment if self._place is not None else {}),
        }
        self._write_keys()
        self._write_settings(environment)
        self.offer(*self._first)
        self.boot(STAGER, *self._first)

    def remove(self) -> None:
        """Remove all processes and names from this machine, whatever happened."""
        with contextlib.ExitStack() as stack:  # each, even if one fails
            for host in self._hosts.values():
                stack.callback(host.remove)
            for run in self._runs:
                stack.callback(run.wait, 30)
                stack.callback(run.kill)

    def _write_keys(self) -> None:
        for name in ("key", *(f"host-{name}" for name in self._hosts)):
            command(
                *("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name),
                *("-f", str(self.directory / name)),
            )

    def _write_settings(self, environment: Mapping[str, str]) -> None:
        directory, hosts = self.directory, self._hosts
        blocks = [
            f"Host {name}\nHostName {host.address}\nHostKeyAlias {name}\n" for name, host in hosts.items()
        ]
        (directory / "ssh").write_text("".join(blocks) + _SSH.format(directory=directory))
        names = [f"{host.address} {name}\n" for name, host in hosts.items()]
        (directory / "names").write_text("127.0.0.1 localhost\n" + "".join(names))
        known = [f"{name} {(directory / f'host-{name}.pub').read_text()}" for name in hosts]
        (directory / "known_hosts").write_text("".join(known))
        for name in hosts:
            own = {} if name == STAGER else {"HOLDFAST_EVENTS": directory / "trainers.jsonl"}
            words = " ".join(f'"{name}={value}"' for name, value in {**environment, **own}.items())
            text = _SSHD.format(directory=directory, name=name, environment=words)
            (directory / f"sshd-{name}").write_text(text)


@contextlib.contextmanager
def cluster_of(
    directory: Path,
    network: Network,
    place: S3Place | None,
    *,
    trainers: int = 3,
    spares: int = 0,
    rate: str = "200mbit",
) -> Iterator[Cluster]:
    """A running cluster, removed at the end."""
    cluster = Cluster(directory, network, place, trainers=trainers, spares=spares, rate=rate)
    try:
        cluster.make()
        yield cluster
    finally:
        cluster.remove()


def _lines(path: Path, event: str) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return [line for line in lines if event in {"", line["event"]}]


def _files(host: Host, place: str) -> list[str]:
    root = host.file(place)
    return [f"{host.name} {path.relative_to(root)}" for path in root.rglob("*") if not path.is_dir()]
