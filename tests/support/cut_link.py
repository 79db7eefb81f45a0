"""A link between two processes that a test cuts: a forwarder of TCP connections on this machine."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from collections.abc import Iterator

_PART_BYTES = 64 * 1024
_RESET = struct.pack("ii", 1, 0)  # of SO_LINGER: closing sends a reset


class CutLink:
    """Forwards every connection to `target` until it is cut.

    Attributes:
        port: Listens here, on 127.0.0.1.
        carried: Bytes so far, both ways. `kept`: the bytes themselves, from `keep_bytes` on.
        cuts: How many connections were cut.
    From now on reset all connections each time this many more bytes were carried; None: stop doing so.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.carried = self.cuts = 0
        self.kept = bytearray()
        self._keeping = False
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._lock = threading.Lock()
        self._closed = self._refusing = False
        self._cut_after: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Reset every connection now; new ones are forwarded."""
        with self._lock:
            for sock in list(self._pairs):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            self.cuts += len(self._pairs) // 2

    def turn_to(self, target: int) -> None:
        """Cut every connection, and forward new ones to this port."""
        self._target = target
        self.cut()

    def cut_each_after(self, nbytes: int | None) -> None:
        """From now on reset all connections whenever this many bytes more were carried; None: no more."""
        self._cut_after = None if nbytes is None else self.carried + nbytes
        self._every = nbytes

    def keep_bytes(self) -> None:
        """From now on keep the bytes that are carried."""
        self._keeping = True

    def refuse(self, refusing: bool) -> None:
        """Set whether new connections are closed at once."""
        self._refusing = refusing

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._closed:
                for key, _ in selector.select(0.05):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    else:
                        self._forward(selector, key.fileobj)  # type: ignore[arg-type]
            for sock in list(self._pairs):
                sock.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        here, _ = self._listener.accept()
        if self._refusing:
            here.close()
            return
        try:
            there = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            here.close()
            return
        with self._lock:
            self._pairs[here], self._pairs[there] = there, here
        for sock in (here, there):
            selector.register(sock, selectors.EVENT_READ)

    def _forward(self, selector: selectors.BaseSelector, sock: socket.socket) -> None:
        other = self._pairs.get(sock)
        if other is None:
            return
        try:
            data = sock.recv(_PART_BYTES)
            if data:
                other.sendall(data)
        except OSError:
            data = b""
        self.carried += len(data)
        if self._keeping:
            self.kept += data
        if not data:
            with self._lock:
                for one in (sock, other):
                    self._pairs.pop(one, None)
                    selector.unregister(one)
                    one.close()
        if self._cut_after is not None and self.carried >= self._cut_after:
            assert self._every is not None
            self._cut_after = self.carried + self._every
            self.cut()

    def close(self) -> None:
        """End everything."""
        self._closed = True
        self._thread.join(5.0)


@contextlib.contextmanager
def cut_link(target: int) -> Iterator[CutLink]:
    """A link to this port of this machine, for the block."""
    link = CutLink(target)
    try:
        yield link
    finally:
        link.close()
