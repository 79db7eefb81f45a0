"""MLC-base, ACUTE's multi-level baseline (IEEE Access 12:116891), written by us from the paper.

    every rank: pack all of the state (torch.save into memory) ─► its part of the pack over a socket ─► remote process:
    join ─► unpack (torch.load) ─► repack (torch.save) ─► fsync ─► "durable" to every rank

Faster than the paper's description: a rank sends only its part of the pack, packing overlaps with the computation and
delays only the update, and a local socket replaces MPI. One checkpoint at a time.
"""

from __future__ import annotations

import io
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.complete import require_same
from benchmarks.peers import Slots, load
from benchmarks.peers.background import Background
from benchmarks.workload import Workload

__all__ = ["HEADER", "MlcBase"]

HEADER = struct.Struct(
    "<IQQQI"
)  # rank, offset, bytes that follow, bytes of the whole pack, length of the path
_START_SECONDS_MAX = 60.0
_END_SECONDS_MAX = 30.0


class MlcBase:
    """A training rank; rank 0 starts the remote process, which ends when all ranks have closed their sockets."""

    def __init__(self, workload: Workload, folder: Path, rank: int, ranks: int) -> None:
        self._workload, self._rank, self._ranks = workload, rank, ranks
        self._slots = Slots(folder, "mlc")
        self._packed, self._sent = Background(), Background()
        self._marks: dict[str, float] = {}
        address = folder / "mlc.socket"
        self._remote: subprocess.Popen[bytes] | None = None
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            address.unlink(missing_ok=True)
            command = [sys.executable, "-m", "benchmarks.peers.mlc_remote", str(address), str(ranks)]
            self._remote = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self._connection = _connect(address)

    def save(self, step: int) -> None:  # noqa: ARG002
        self._packed.wait()
        self._sent.wait()
        self._marks = {}
        state, path = self._workload.state_dict(), self._slots.next()

        def pack() -> None:
            packed = io.BytesIO()
            torch.save(state, packed)
            self._marks["copied"] = time.monotonic()
            self._sent.start(lambda: self._send(packed, path))

        self._packed.start(pack)

    def _send(self, packed: io.BytesIO, path: Path) -> None:
        with packed.getbuffer() as whole:
            begin = self._rank * whole.nbytes // self._ranks
            end = (self._rank + 1) * whole.nbytes // self._ranks
            name = str(path).encode()
            header = HEADER.pack(self._rank, begin, end - begin, whole.nbytes, len(name))
            self._connection.sendall(header + name)
            self._connection.sendall(whole[begin:end])
        for mark in ("staged", "durable"):
            if self._connection.recv(1) != mark[:1].encode():
                raise RuntimeError(f"mlc-base: the remote process did not say {mark!r}; see the log")
            self._marks[mark] = time.monotonic()

    def before_update(self) -> None:
        self._packed.wait()

    def done(self) -> bool:
        return self._packed.done() and self._sent.done()

    def marks(self) -> dict[str, float]:
        return {name: at for name, at in self._marks.items() if name != "durable"}

    def verify(self) -> int:
        if self._rank:
            return 0
        return require_same(self._workload.state_dict(), load(self._slots.newest), what="mlc-base")

    def clean(self) -> None:
        if self._rank == 0:
            self._slots.remove()

    def close(self) -> None:
        self._packed.wait()
        self._sent.wait()
        self._connection.close()
        if self._remote is not None:
            try:
                self._remote.wait(_END_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                self._remote.kill()
                self._remote.wait()


def _connect(address: Path) -> socket.socket:
    deadline = time.monotonic() + _START_SECONDS_MAX
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(address))
        except OSError:
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return connection
