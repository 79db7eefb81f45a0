"""A Docker engine for the tests, and the sources of its images where no image can be pulled.

    debootstrap ─► holdfast-base:local ─┐
    pip, on this machine ─► wheels ─► an index on the loopback ─► docker-compose build ─► images ─► containers

Base and wheels are kept in .services/compose. The engine has its own folders, socket and bridge, beside any other on
this machine, and leaves nothing behind. Builds use this machine's network; no container does.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import http.server
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.support.cluster import wait_until
from tests.support.job import REPOSITORY

__all__ = ["BASE", "BRIDGE", "Engine", "Unbuildable", "index_of_wheels", "running_engine", "why_not"]

BASE = "holdfast-base:local"
BRIDGE = "hfcompose"  # our own name, so that leftovers of a killed run can be removed
_HOME = REPOSITORY / ".services" / "compose"
# Debian's own programs: a newer client on PATH builds with a plug-in that may be missing.
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_TOOLS = ("dockerd", "docker", "docker-compose", "debootstrap", "iptables", "ip", "setpriv")
_SUITE = "bookworm"
_BASE_PACKAGES = "ca-certificates,python3,python3-pip,python-is-python3"
_UP_SECONDS_MAX = 60.0
_BUILD_SECONDS_MAX = 1800.0
# Without these files an image is half as large.
_LEFT_OUT = (
    "var/cache/apt/archives",
    "var/lib/apt/lists",
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
)


class Unbuildable(Exception):
    """The base or the wheels cannot be made on this machine; the message says why."""


def why_not() -> str:
    """Return why no Docker engine can be started here, or ""."""
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]
    if missing:
        return (
            f"no {', '.join(missing)} here (`make compose` installs docker.io, docker-compose, debootstrap)"
        )
    if os.geteuid() != 0:
        return "a Docker engine needs root"
    tried = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "hfprobe", "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    return f"no bridge can be made: {tried.stderr.strip()}" if tried.returncode else ""


class Engine:
    """A running engine. Made by `running_engine`.

    Attributes:
        environment: Makes `docker` and `docker-compose` use this engine only.
    """

    def __init__(self, socket: Path) -> None:
        # BuildKit reads Dockerfile.dockerignore.
        self.environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("DOCKER", "COMPOSE"))
            },
            "PATH": _PATH,
            "DOCKER_HOST": f"unix://{socket}",
            "DOCKER_BUILDKIT": "1",
            "COMPOSE_DOCKER_CLI_BUILD": "1",
        }

    def run(self, *words: str | Path, seconds_max: float = 120.0) -> str:
        """Run a command, such as `docker ps`; return its output. If the command fails, the test fails."""
        done = subprocess.run(
            words,
            cwd=REPOSITORY,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds_max,
        )
        command = " ".join(map(str, words))
        assert done.returncode == 0, (
            f"{command}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
        return done.stdout

    def build(self, *words: str | Path) -> None:
        """`docker build`, on this machine's network."""
        self.run("docker", "build", "--network", "host", *words, seconds_max=_BUILD_SECONDS_MAX)


@contextlib.contextmanager
def running_engine() -> Iterator[Engine]:
    """Start an engine with the image `BASE`. At the end it is stopped, and its images are removed.

    Raises:
        Unbuildable: The base cannot be made.
    """
    base = _base()
    with contextlib.ExitStack() as stack:
        # One at a time: the bridge has one name, and the network of infra/docker/nfs.yml one address.
        lock = stack.enter_context((Path(tempfile.gettempdir()) / "holdfast-compose.lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        _remove_bridge()
        stack.callback(_remove_bridge)
        home = Path(tempfile.mkdtemp(prefix="holdfast-docker-"))
        stack.callback(shutil.rmtree, home)
        socket, log = home / "docker.sock", home / "log"
        command: list[str | Path] = ["dockerd", "--host", f"unix://{socket}", "--pidfile", home / "pid"]
        command += ["--data-root", home / "data", "--exec-root", home / "exec", "--group", "root"]
        # Change no firewall rule of this machine: the cluster has only inner traffic, and docker-proxy forwards ports.
        command += ["--bridge", "none", "--iptables=false", "--ip-forward=false"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *command],
                env={**os.environ, "PATH": _PATH},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches the test, which then stops the engine
            )
        stack.callback(_stop, process, home)
        wait_until(
            lambda: socket.exists() or process.poll() is not None, _UP_SECONDS_MAX, "dockerd does not listen"
        )
        assert process.poll() is None, f"dockerd ended:\n{log.read_text()[-3000:]}"
        engine = Engine(socket)
        engine.run("docker", "import", base, BASE)
        yield engine


def _stop(process: subprocess.Popen[bytes], home: Path) -> None:
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    # An engine that ended by itself has unmounted everything.
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount in reversed([one for one in mounts if one.startswith(f"{home}/")]):
        subprocess.run(["umount", "--lazy", mount], capture_output=True, check=False, timeout=30)


def _remove_bridge() -> None:
    subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True, check=False, timeout=30)


@contextlib.contextmanager
def _kept(name: str, stamp: str) -> Iterator[Path | None]:
    """The folder to fill; None if it is filled already, for the same stamp. Several processes may call this at once."""
    _HOME.mkdir(parents=True, exist_ok=True)
    folder, written = _HOME / name, _HOME / f"{name}.stamp"
    with (_HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if written.exists() and written.read_text() == stamp:
            yield None
            return
        written.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        yield folder
        written.write_text(stamp)


def _run(*words: str | Path) -> None:
    """Run a command that prepares the engine; its failure skips the tests."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_BUILD_SECONDS_MAX)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-400:]
        raise Unbuildable(f"`{Path(words[0]).name}` failed, without which no image can be built: {said}")


def _base() -> Path:
    """A tar file of Debian with Python and pip, like the public image that it stands in for."""
    archive = _HOME / "base" / "base.tar"
    with _kept("base", f"{_SUITE} {_BASE_PACKAGES}") as folder:
        if folder is not None:
            tree = folder / "tree"
            debootstrap = shutil.which("debootstrap", path=_PATH)
            assert debootstrap is not None
            _run(debootstrap, "--variant=minbase", f"--include={_BASE_PACKAGES}", _SUITE, tree)
            # pip may install into the image, as into the public one.
            for mark in tree.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
                mark.unlink()
            for name in _LEFT_OUT:
                shutil.rmtree(tree / name, ignore_errors=True)
            (tree / "var/cache/apt/archives/partial").mkdir(parents=True)
            _run("tar", "-C", tree, "-cf", archive, ".")
            shutil.rmtree(tree)
    return archive


def _wheels() -> Path:
    """All packages that the images install, downloaded by this machine's pip, as a package index on disk."""
    sources = [
        REPOSITORY / name for name in ("constraints.txt", "requirements.lock", "requirements-mpi.lock")
    ]
    swift = REPOSITORY / "infra" / "docker" / "s3" / "requirements.txt"
    stamp = hashlib.sha256(b"".join(path.read_bytes() for path in [*sources, swift])).hexdigest()
    with _kept("wheels", stamp) as folder:
        if folder is not None:
            pip: list[str | Path] = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--dest",
                folder / "all",
            ]
            # For the Python of the base, not the one that runs here.
            pip += ["--python-version", "3.11", "--only-binary", ":all:"]
            _run(*pip, "--require-hashes", "-r", sources[1], "-r", sources[2])
            _run(*pip, "-c", sources[0], "torch")
            _run(*pip, "-r", swift)
            for wheel in (folder / "all").iterdir():
                name = wheel.name.partition("-")[0].lower().replace("_", "-").replace(".", "-")
                (folder / name).mkdir(exist_ok=True)
                wheel.rename(folder / name / wheel.name)
    return _HOME / "wheels"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def index_of_wheels() -> Iterator[str]:
    """URL of a package index on the loopback with all packages that the images install.

    Raises:
        Unbuildable: pip cannot download them.
    """
    handler = functools.partial(_Quiet, directory=str(_wheels()))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()
