"""A real S3 server for tests: OpenStack Swift with its S3 API, installed and run by us, on this machine only.

    install (own environment, once) ─► rings, configuration ─► account, container, object, proxy ─► answers ─► stop

It checks signatures and part CRCs, keeps open uploads over a kill, and is eventually consistent in places, as S3
itself was. `python -m tests.support.swift --install` installs it ahead of time.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import getpass
import http.client
import logging
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["SwiftServer", "free_port", "install", "running_swift"]

_log = logging.getLogger("holdfast.tests.swift")

_REQUIREMENT = "swift==2.38.3"
_ROOT = Path(__file__).resolve().parents[2]
_HOME = _ROOT / ".services" / "swift"
_START_SECONDS_MAX = 120.0
_STOP_SECONDS_MAX = 10.0

ACCESS_KEY = "test:tester"
SECRET_KEY = "testing"

_SWIFT_CONF = """\
[swift-hash]
swift_hash_path_suffix = holdfast
swift_hash_path_prefix = tests
[storage-policy:0]
name = default
default = yes
"""

_STORAGE_CONF = """\
[DEFAULT]
swift_dir = {home}/etc
devices = {home}/srv
mount_check = false
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = {user}
log_level = WARNING
fallocate_reserve = 0
[pipeline:main]
pipeline = {kind}-server
[app:{kind}-server]
use = egg:swift#{kind}
"""

_PROXY_CONF = """\
[DEFAULT]
swift_dir = {home}/etc
bind_ip = {address}
bind_port = {port}
workers = 0
user = {user}
log_level = WARNING
[pipeline:main]
pipeline = catch_errors gatekeeper listing_formats s3api tempauth copy slo symlink versioned_writes proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:gatekeeper]
use = egg:swift#gatekeeper
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:s3api]
use = egg:swift#s3api
s3_acl = false
location = us-east-1
allow_multipart_uploads = true
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
[filter:copy]
use = egg:swift#copy
[filter:slo]
use = egg:swift#slo
[filter:versioned_writes]
use = egg:swift#versioned_writes
allow_object_versioning = true
[filter:symlink]
use = egg:swift#symlink
"""

# One device, one replica; `swift-ring-builder` by its Python interface, three rings in one process.
_MAKE_RINGS = """\
import sys
from swift.common.ring import RingBuilder
for kind, port, name in zip(sys.argv[2::3], sys.argv[3::3], sys.argv[4::3]):
    builder = RingBuilder(4, 1, 0)
    builder.add_dev(dict(id=0, region=1, zone=1, ip="127.0.0.1", port=int(port), device="d1", weight=1.0,
                         replication_ip="127.0.0.1", replication_port=int(port), meta=""))
    builder.rebalance()
    builder.get_ring().save(f"{sys.argv[1]}/{name}.ring.gz")
"""


def install() -> Path:
    """Install Swift into its own virtual environment, once; several processes may ask at the same time.

    Returns:
        The folder with its commands.

    Raises:
        subprocess.CalledProcessError: pip could not; its output is in `stderr`.
    """
    _HOME.parent.mkdir(exist_ok=True)
    stamp = _HOME / "installed"
    with (_HOME.parent / "swift.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != _REQUIREMENT:
            _log.info("installing %s into %s", _REQUIREMENT, _HOME)
            shutil.rmtree(_HOME, ignore_errors=True)
            subprocess.run(
                [sys.executable, "-m", "venv", str(_HOME)], check=True, capture_output=True, text=True
            )
            pip = [str(_HOME / "bin" / "python"), "-m", "pip", "install", "--quiet", _REQUIREMENT]
            subprocess.run(pip, check=True, capture_output=True, text=True)
            stamp.write_text(_REQUIREMENT)
    return _HOME / "bin"


def free_port() -> int:
    """A TCP port of this machine that nothing listens on at this moment.

    Below those that the kernel gives away: between now and the server's start another test may ask it for many.
    """
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(10_000, max(first_given, 20_000))))
            return int(probe.getsockname()[1])


class SwiftServer:
    """The four processes of one Swift. Data and ports stay the same over `stop` and `start`.

    Args:
        home: An empty folder for configuration, data and logs.
        commands: What `install` gave back.
        address: Where its S3 interface listens.
    """

    access_key, secret_key = ACCESS_KEY, SECRET_KEY

    def __init__(self, home: Path, commands: Path, *, address: str = "127.0.0.1") -> None:
        self._home, self._commands, self._address = home, commands, address
        self._ports = {kind: free_port() for kind in ("account", "container", "object", "proxy")}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._configure()

    @property
    def endpoint(self) -> str:
        """URL of the S3 interface."""
        return f"http://{self._address}:{self._ports['proxy']}"

    def start(self) -> None:
        """Start the processes and wait until the proxy answers.

        Raises:
            RuntimeError: A process ended or none answered in time; with the end of the logs.
        """
        for kind in self._ports:
            command = [
                str(self._commands / f"swift-{kind}-server"),
                str(self._home / "etc" / f"{kind}-server.conf"),
            ]
            if shutil.which("setpriv"):
                command = [
                    "setpriv",
                    "--pdeathsig",
                    "KILL",
                    *command,
                ]  # a killed test run must not leave servers behind
            with (self._home / f"{kind}.log").open("ab") as log:
                self._processes.append(
                    subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._home
                    )
                )
        deadline = time.monotonic() + _START_SECONDS_MAX
        while not self._answers():
            if any(process.poll() is not None for process in self._processes) or time.monotonic() > deadline:
                tails = "\n".join(
                    f"{log.name}: {log.read_text()[-1500:]}" for log in sorted(self._home.glob("*.log"))
                )
                self.stop()
                raise RuntimeError(f"Swift did not start in {_START_SECONDS_MAX} s:\n{tails}")
            time.sleep(0.05)

    def stop(self, *, kill: bool = False) -> None:
        """End the processes; with `kill` without notice, as a machine that goes away."""
        for process in self._processes:
            if kill:
                process.kill()
            else:
                process.terminate()
        for process in self._processes:
            try:
                process.wait(_STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def _configure(self) -> None:
        etc = self._home / "etc"
        etc.mkdir(parents=True)
        (self._home / "srv" / "d1").mkdir(parents=True)
        (etc / "swift.conf").write_text(_SWIFT_CONF)
        for kind, port in self._ports.items():
            template = _PROXY_CONF if kind == "proxy" else _STORAGE_CONF
            text = template.format(
                home=self._home, port=port, kind=kind, user=getpass.getuser(), address=self._address
            )
            (etc / f"{kind}-server.conf").write_text(text)
        rings = [(kind, str(self._ports[kind]), kind) for kind in ("account", "container", "object")]
        arguments = [word for ring in rings for word in ring]
        python = str(self._commands / "python")
        subprocess.run(
            [python, "-W", "ignore", "-c", _MAKE_RINGS, str(etc), *arguments],
            check=True,
            capture_output=True,
            text=True,
        )

    def _answers(self) -> bool:
        for kind in ("account", "container", "object"):
            with contextlib.closing(socket.socket()) as probe:
                if probe.connect_ex(("127.0.0.1", self._ports[kind])) != 0:
                    return False
        connection = http.client.HTTPConnection(self._address, self._ports["proxy"], timeout=5)
        try:
            connection.request("GET", "/info")
            with connection.getresponse() as response:  # it has the socket open, beyond the connection's end
                return response.status == 200
        except OSError:
            return False
        finally:
            connection.close()


@contextlib.contextmanager
def running_swift() -> Iterator[SwiftServer]:
    """A started Swift, installed before if need be; stopped and its data removed at the end."""
    commands = install()
    with tempfile.TemporaryDirectory(prefix="holdfast-swift-") as home:
        server = SwiftServer(Path(home), commands)
        server.start()
        try:
            yield server
        finally:
            server.stop()


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--install", action="store_true", help="install Swift and end")
    if not parser.parse_args().install:
        parser.error("nothing to do; give --install")
    try:
        print(install())
    except subprocess.CalledProcessError as error:
        print(
            f"Swift cannot be installed; the tests marked s3 that need it will be skipped:\n{error.stderr}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    _main()
