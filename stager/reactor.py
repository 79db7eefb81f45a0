"""Which of many sockets can be read or written now: epoll, and whom each event concerns."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable

_EVENTS_PER_TURN_MAX = 256
_READABLE = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP

OnReady = Callable[[bool, bool], None]


class Reactor:
    """See the module. One thread; nothing here waits."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._on_ready: dict[int, OnReady] = {}
        self._wanting: set[int] = set()
        self._each_turn: list[Callable[[], None]] = []

    def fileno(self) -> int:
        """A descriptor that can be read when `turn` has something to do."""
        return self._epoll.fileno()

    def watch(self, sock: socket.socket, on_ready: OnReady) -> None:
        """From now on call `on_ready(readable, writable)` in `turn` when there is something to read."""
        self._on_ready[sock.fileno()] = on_ready
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def want_write(self, sock: socket.socket, wanted: bool) -> None:
        """Whether to call it when there is room to write, too."""
        descriptor = sock.fileno()
        if wanted != (descriptor in self._wanting):  # a call of the system for each message would cost
            self._epoll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))
            (self._wanting.add if wanted else self._wanting.discard)(descriptor)

    def unwatch(self, sock: socket.socket) -> None:
        """Watch it no more; it stays open. Safe to call twice."""
        descriptor = sock.fileno()
        if descriptor >= 0 and self._on_ready.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)
            self._wanting.discard(descriptor)

    def close(self, sock: socket.socket) -> None:
        """Watch it no more, and close it. Safe to call twice."""
        self.unwatch(sock)
        sock.close()

    def each_turn(self, call: Callable[[], None]) -> None:
        """Call this in every turn, for what has a deadline."""
        self._each_turn.append(call)

    def turn(self) -> bool:
        """Call whom the present events concern; whether there were any."""
        for call in self._each_turn:
            call()
        events = self._epoll.poll(0, _EVENTS_PER_TURN_MAX)
        for descriptor, mask in events:
            on_ready = self._on_ready.get(descriptor)
            if on_ready is not None:  # a call before this one has not closed it
                on_ready(bool(mask & _READABLE), bool(mask & select.EPOLLOUT))
        return bool(events)
