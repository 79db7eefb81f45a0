"""The remote process of MLC-base: joins the ranks' parts of the pack, unpacks, repacks, writes and syncs.

python -m benchmarks.peers.mlc_remote SOCKET RANKS
"""

from __future__ import annotations

import io
import socket
import sys
import threading
from pathlib import Path

import torch

from benchmarks.peers.mlc_base import HEADER
from benchmarks.peers.torch_save import write_synced

__all__ = ["main", "serve"]


def _exactly(connection: socket.socket, view: memoryview) -> bool:
    """Fill `view`; return False if the other side has closed the socket before the first byte."""
    got = 0
    while got < view.nbytes:
        count = connection.recv_into(view[got:])
        if count == 0:
            if got == 0:
                return False
            raise ConnectionError(f"a rank hung up after {got} of {view.nbytes} bytes")
        got += count
    return True


class _Joined:
    """The joined pack, in memory that is reused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.buffer = bytearray()

    def view(self, nbytes: int) -> memoryview:
        with self._lock:
            if len(self.buffer) != nbytes:
                self.buffer = bytearray(nbytes)
            return memoryview(self.buffer)


def _receive(connection: socket.socket, joined: _Joined) -> Path | None:
    """Receive one rank's part; return the file's path, None if the rank has closed the socket."""
    head = bytearray(HEADER.size)
    if not _exactly(connection, memoryview(head)):
        return None
    _, begin, nbytes, whole_bytes, name_bytes = HEADER.unpack(head)
    name = bytearray(name_bytes)
    _exactly(connection, memoryview(name))
    if nbytes:
        _exactly(connection, joined.view(whole_bytes)[begin : begin + nbytes])
    return Path(name.decode())


def serve(server: socket.socket, ranks: int) -> None:
    """Take checkpoints until a rank closes its socket."""
    connections = [server.accept()[0] for _ in range(ranks)]
    joined = _Joined()
    paths: list[Path | None] = [None] * ranks

    def receive(place: int) -> None:
        paths[place] = _receive(connections[place], joined)

    while True:
        threads = [threading.Thread(target=receive, args=(place,)) for place in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        path = paths[0]
        if path is None or None in paths:
            break
        for connection in connections:
            connection.sendall(b"s")
        state = torch.load(io.BytesIO(joined.buffer), weights_only=True)
        write_synced(state, path)
        del state
        for connection in connections:
            connection.sendall(b"d")
    for connection in connections:
        connection.close()


def main() -> None:
    """Entry point."""
    address, ranks = sys.argv[1:]
    torch.set_num_threads(1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(address)
        server.listen()
        server.settimeout(60.0)
        serve(server, int(ranks))


if __name__ == "__main__":
    main()
