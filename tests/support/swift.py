"""A real S3 server for tests: OpenStack Swift with its S3 API, installed and run on this machine only.

    install (own environment, once) ─► rings, configuration ─► account, container, object, proxy ─► answers ─► stop

Swift checks signatures and part CRCs, keeps open uploads over a kill, and is eventually consistent in places, as S3
once was. `python -m tests.support.swift --install` installs it ahead of time.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import http.client
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.free_port import free_port

__all__ = ["SwiftServer", "install", "running_swift"]

_log = logging.getLogger("holdfast.tests.swift")

_ROOT = Path(__file__).resolve().parents[2]
_HOME = _ROOT / ".services" / "swift"
_IMAGE = _ROOT / "infra" / "docker" / "s3"
_REQUIREMENT = (_IMAGE / "requirements.txt").read_text().strip()
_START_SECONDS_MAX = 120.0
_STOP_SECONDS_MAX = 10.0

ACCESS_KEY = "test:tester"
SECRET_KEY = "testing"


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
            # Use the pip of this environment: installing another one would take seconds.
            pip = [
                sys.executable,
                "-m",
                "pip",
                "--python",
                str(_HOME / "bin" / "python"),
                "install",
                "--quiet",
            ]
            for command in (
                [sys.executable, "-m", "venv", "--without-pip", str(_HOME)],
                [*pip, _REQUIREMENT],
            ):
                subprocess.run(command, check=True, capture_output=True, text=True)
            stamp.write_text(_REQUIREMENT)
    return _HOME / "bin"


class SwiftServer:
    """The four processes of one Swift. Data and ports survive `stop` and `start`.

    Args:
        home: An empty folder for configuration, data and logs.
        commands: The folder that `install` returned.
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
        """End the processes; with `kill` by SIGKILL, as a machine that vanishes."""
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
        python = [str(self._commands / "python"), "-W", "ignore", str(_IMAGE / "configure.py")]
        ports = [str(self._ports[kind]) for kind in ("proxy", "account", "container", "object")]
        env = os.environ | {"S3_KEY": ACCESS_KEY, "S3_SECRET": SECRET_KEY}
        subprocess.run(
            [*python, str(self._home), self._address, *ports],
            env=env,
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
            with connection.getresponse() as response:  # holds the socket beyond the connection's end
                return response.status == 200
        except OSError:
            return False
        finally:
            connection.close()


@contextlib.contextmanager
def running_swift() -> Iterator[SwiftServer]:
    """A started Swift, installed first if need be; stopped, and its data removed, at the end."""
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
