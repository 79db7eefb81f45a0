"""moto's S3 server as a child process: an independent implementation of S3 to check our requests.

moto is atomic where Swift is not (`If-None-Match`), and refuses small parts. It checks neither signatures nor CRCs, so
a pass here proves nothing about those.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.free_port import free_port

__all__ = ["running_moto"]

_START_SECONDS_MAX = 120.0


@contextlib.contextmanager
def running_moto() -> Iterator[str]:
    """Start a moto server; yield its endpoint."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1", "-p", str(port)]
    if shutil.which("setpriv"):
        command = ["setpriv", "--pdeathsig", "KILL", *command]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + _START_SECONDS_MAX
            while not _listens(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"moto_server did not start: {log.read()[-2000:]!r}")
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()  # moto holds nothing that needs a clean shutdown
            process.wait()


def _listens(port: int) -> bool:
    with contextlib.closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
