"""How either end of a connection finds out that the other's machine is gone, although nothing says so."""

from __future__ import annotations

import socket

from holdfast.net.tls import AnySocket

_IDLE_SECONDS, _EVERY_SECONDS, _PROBES = 5, 2, 3
UNANSWERED_SECONDS_MAX = 10.0


def find_dead_peers(sock: AnySocket, *, messages: bool) -> None:
    """Have the system end the connection when the other machine has answered nothing for about ten seconds. A stopped
    process is no reason: its system answers for it. `messages`: they are small and always find room; payloads may wait
    for a stopped process with their window closed, which the system would take for death.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _EVERY_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    if messages:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNANSWERED_SECONDS_MAX * 1000))
