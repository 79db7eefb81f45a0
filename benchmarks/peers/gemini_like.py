"""Gemini's way (Wang et al., SOSP 2023), as PCcheck compares it, written by us: a baseline, not their code.

    save() ─► copy in this machine's memory, beside the computation ─► a peer's memory (gemini_memory.py) ─► "kept"
    before_update() waits for the copy; the next save() waits for "kept": one checkpoint at a time

Nothing becomes durable: a save ends when the peer has all bytes. Faster than their code: a local socket replaces the
network, which Gemini shares with the training. Only rank 0 saves.
"""

from __future__ import annotations

import socket
import subprocess
import sys

import torch

from benchmarks.complete import require_same
from benchmarks.peers.background import Background
from benchmarks.peers.flat_state import FlatState, parsed
from benchmarks.peers.gemini_memory import FETCH, HEADER, KEPT, take
from benchmarks.workload import Workload

__all__ = ["GeminiLike"]

_END_SECONDS_MAX = 30.0


class GeminiLike:
    """The training rank, which starts a process as the peer's memory."""

    def __init__(self, workload: Workload, rank: int) -> None:
        self._workload, self._rank = workload, rank
        self._copied, self._sent = Background(), Background()
        if rank:
            return
        self._memory = torch.zeros(FlatState(workload.state_dict()).room_bytes, dtype=torch.uint8)
        self._connection, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "benchmarks.peers.gemini_memory", str(theirs.fileno())]
            self._peer = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])

    def save(self, step: int) -> None:  # noqa: ARG002 - the peer keeps the newest
        if self._rank:
            return
        self._copied.wait()
        self._sent.wait()
        state = FlatState(self._workload.state_dict())

        def copy() -> None:
            state.copy_to(self._memory)
            self._sent.start(lambda: self._send(state.nbytes))

        self._copied.start(copy)

    def _send(self, nbytes: int) -> None:
        self._connection.sendall(HEADER.pack(nbytes))
        self._connection.sendall(self._memory[:nbytes].numpy().data)
        if self._connection.recv(1) != KEPT:
            raise RuntimeError(
                "gemini-like: the peer's memory did not say that it keeps the state; see the log"
            )

    def before_update(self) -> None:
        self._copied.wait()

    def done(self) -> bool:
        return self._copied.done() and self._sent.done()

    def marks(self) -> dict[str, float]:
        return {}

    def verify(self) -> int:
        """Fetch the checkpoint from the peer's memory, and compare it."""
        if self._rank:
            return 0
        self._connection.sendall(HEADER.pack(FETCH))
        (nbytes,) = HEADER.unpack(take(self._connection, bytearray(HEADER.size)))
        data = take(self._connection, bytearray(nbytes))
        return require_same(self._workload.state_dict(), parsed(data, what="gemini-like"), what="gemini-like")

    def clean(self) -> None:
        """Do nothing: the peer's memory is reused."""

    def close(self) -> None:
        if self._rank:
            return
        self._copied.wait()
        self._sent.wait()
        self._connection.close()
        try:
            self._peer.wait(_END_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._peer.kill()
            self._peer.wait()
