"""TCP keepalive settings, by which each end of a connection notices that the other machine has vanished."""

from __future__ import annotations

import socket

from holdfast.net.tls import AnySocket

_IDLE_SECONDS, _EVERY_SECONDS, _PROBES = 5, 2, 3
UNANSWERED_SECONDS_MAX = 10.0


def enable_keepalive(sock: AnySocket, *, messages: bool) -> None:
    """Have the kernel end the connection if the other machine does not answer for about ten seconds. A stopped process
    does not count: its kernel answers. `messages`: also limit unacknowledged data; not for payloads, which may wait at
    the closed window of a stopped process.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _EVERY_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    if messages:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNANSWERED_SECONDS_MAX * 1000))
