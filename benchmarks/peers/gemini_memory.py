"""The peer's memory of `gemini-like`: a process that keeps the newest complete state, and returns it on FETCH.

n, n bytes ─► the older of two buffers ─► KEPT        FETCH ─► bytes of the newest state

python -m benchmarks.peers.gemini_memory FD     ends when the other end is closed
"""

from __future__ import annotations

import socket
import struct
import sys

__all__ = ["FETCH", "HEADER", "KEPT", "main", "take"]

HEADER = struct.Struct("<Q")  # number of bytes that follow
FETCH = 2**64 - 1  # sent instead of a number
KEPT = b"k"


def take(connection: socket.socket, buffer: bytearray | memoryview) -> memoryview:
    """Fill `buffer`.

    Raises:
        EOFError: The other end has closed the connection.
    """
    view = memoryview(buffer)
    at = 0
    while at < len(view):
        count = connection.recv_into(view[at:])
        if not count:
            raise EOFError(f"{len(view) - at} of {len(view)} bytes are missing")
        at += count
    return view


def main() -> None:
    buffers = [bytearray(), bytearray()]
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        newest = 0
        while True:
            try:
                (nbytes,) = HEADER.unpack(take(connection, bytearray(HEADER.size)))
            except (EOFError, ConnectionError):
                return
            if nbytes == FETCH:
                connection.sendall(HEADER.pack(len(buffers[newest])))
                connection.sendall(buffers[newest])
                continue
            other = 1 - newest
            if len(buffers[other]) != nbytes:  # allocated and touched once
                buffers[other] = bytearray(nbytes)
            take(connection, buffers[other])
            newest = other
            connection.sendall(KEPT)


if __name__ == "__main__":
    main()
