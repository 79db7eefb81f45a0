"""An event loop over epoll: calls each socket's callback when the socket can be read or written."""

from __future__ import annotations

import os
import select
from collections.abc import Callable

from holdfast.net.tls import AnySocket, TlsSocket

_EVENTS_PER_TURN_MAX = 256
_READABLE = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP

OnReady = Callable[[bool, bool], None]


class Reactor:
    """Calls callbacks of ready sockets. One thread; no method blocks."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._on_ready: dict[int, OnReady] = {}
        self._watching_writable: set[int] = set()
        self._turn_callbacks: list[Callable[[], None]] = []
        self._with_tls: dict[int, TlsSocket] = {}
        self._unread: set[int] = set()  # TLS sockets with decrypted bytes, which epoll does not report
        self._wake = -1

    def fileno(self) -> int:
        """A descriptor that can be read when `run_once` has something to do."""
        return self._epoll.fileno()

    def watch(self, sock: AnySocket, on_ready: OnReady) -> None:
        """Have `run_once` call `on_ready(readable, writable)` when the socket can be read."""
        descriptor = sock.fileno()
        self._on_ready[descriptor] = on_ready
        self._epoll.register(descriptor, select.EPOLLIN)
        if isinstance(sock, TlsSocket):
            self._with_tls[descriptor] = sock
            self._note_unread(descriptor)

    def watch_writable(self, sock: AnySocket, wanted: bool) -> None:
        """Set whether the callback is also called when the socket can be written."""
        descriptor = sock.fileno()
        if wanted != (descriptor in self._watching_writable):  # saves a system call for each message
            self._epoll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))
            (self._watching_writable.add if wanted else self._watching_writable.discard)(descriptor)

    def unwatch(self, sock: AnySocket) -> None:
        """Stop watching the socket, which stays open. Safe to call twice."""
        descriptor = sock.fileno()
        if descriptor >= 0 and self._on_ready.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)
            self._watching_writable.discard(descriptor)
            self._with_tls.pop(descriptor, None)
            self._unread.discard(descriptor)

    def close(self, sock: AnySocket) -> None:
        """Stop watching the socket, and close it. Safe to call twice."""
        self.unwatch(sock)
        sock.close()

    def add_turn_callback(self, call: Callable[[], None]) -> None:
        """Have every `run_once` call this, to check deadlines."""
        self._turn_callbacks.append(call)

    def run_once(self) -> bool:
        """Call the callbacks of all ready sockets; return whether there were events."""
        for call in self._turn_callbacks:
            call()
        unread, self._unread = self._unread, set()
        events = self._epoll.poll(0, _EVENTS_PER_TURN_MAX)
        for descriptor, mask in events:
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
                continue
            unread.discard(descriptor)
            self._call(descriptor, bool(mask & _READABLE), bool(mask & select.EPOLLOUT))
        for descriptor in unread:
            self._call(descriptor, True, False)
        return bool(events)

    def _call(self, descriptor: int, readable: bool, writable: bool) -> None:
        on_ready = self._on_ready.get(descriptor)
        if on_ready is not None:  # an earlier callback of this turn may have closed the socket
            on_ready(readable, writable)
            if self._with_tls:
                self._note_unread(descriptor)

    def _note_unread(self, descriptor: int) -> None:
        """If a TLS socket still has decrypted bytes, wake the next turn at once to handle them."""
        sock = self._with_tls.get(descriptor)
        if sock is None or sock.fileno() < 0 or not sock.pending():
            return
        if self._wake < 0:
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._epoll.register(self._wake, select.EPOLLIN)
        if not self._unread:
            os.eventfd_write(self._wake, 1)
        self._unread.add(descriptor)
