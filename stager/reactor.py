"""Tells which sockets can be read or written now: epoll, with an owner for each socket."""

from __future__ import annotations

import os
import select
from collections.abc import Callable

from holdfast.net.tls import AnySocket, TlsSocket

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
        self._with_tls: dict[int, TlsSocket] = {}
        self._unread: set[int] = set()  # of these: bytes that no event tells of
        self._wake = -1

    def fileno(self) -> int:
        """A descriptor that can be read when `turn` has something to do."""
        return self._epoll.fileno()

    def watch(self, sock: AnySocket, on_ready: OnReady) -> None:
        """From now on call `on_ready(readable, writable)` in `turn` when there is something to read."""
        descriptor = sock.fileno()
        self._on_ready[descriptor] = on_ready
        self._epoll.register(descriptor, select.EPOLLIN)
        if isinstance(sock, TlsSocket):
            self._with_tls[descriptor] = sock
            self._note_unread(descriptor)

    def want_write(self, sock: AnySocket, wanted: bool) -> None:
        """Whether to call it when there is room to write, too."""
        descriptor = sock.fileno()
        if wanted != (descriptor in self._wanting):  # a call of the system for each message would cost
            self._epoll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))
            (self._wanting.add if wanted else self._wanting.discard)(descriptor)

    def unwatch(self, sock: AnySocket) -> None:
        """Watch it no more; it stays open. Safe to call twice."""
        descriptor = sock.fileno()
        if descriptor >= 0 and self._on_ready.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)
            self._wanting.discard(descriptor)
            self._with_tls.pop(descriptor, None)
            self._unread.discard(descriptor)

    def close(self, sock: AnySocket) -> None:
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
        if on_ready is not None:  # a call before this one has not closed it
            on_ready(readable, writable)
            if self._with_tls:
                self._note_unread(descriptor)

    def _note_unread(self, descriptor: int) -> None:
        """Decrypted bytes of TLS that are still unread are handled in the next turn, which is due at once."""
        sock = self._with_tls.get(descriptor)
        if sock is None or sock.fileno() < 0 or not sock.pending():
            return
        if self._wake < 0:
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._epoll.register(self._wake, select.EPOLLIN)
        if not self._unread:
            os.eventfd_write(self._wake, 1)
        self._unread.add(descriptor)
