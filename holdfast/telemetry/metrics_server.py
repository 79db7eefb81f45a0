"""The HTTP server behind `/metrics`: few connections, and idle ones are closed."""

from __future__ import annotations

import socket
import threading
import time
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

# One Prometheus needs one connection. Each costs a descriptor, and the ring and the store need descriptors, too.
_CONNECTIONS_MAX = 8
_SILENT_SECONDS_MAX = 5.0  # timeout of each read and write
_NO_DESCRIPTOR_SECONDS = 0.5


class _Handler(WSGIRequestHandler):
    timeout = _SILENT_SECONDS_MAX

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as its base
        """Log no scrapes."""


class _Server(ThreadingMixIn, WSGIServer):
    """Server with a thread for each connection; closes a connection beyond `_CONNECTIONS_MAX` at once."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], family: int) -> None:
        self.address_family = family
        self._free = threading.BoundedSemaphore(_CONNECTIONS_MAX)
        super().__init__(address, _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(_NO_DESCRIPTOR_SECONDS)  # the connection is still queued: without a pause, this loops
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # cannot start a thread
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect in the middle or time out."""


def start_server(host: str, port: int, application: WSGIApplication) -> _Server:
    """Serve `application` in background threads. Raises `OSError`: the port is not available."""
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    server = _Server((str(address[0]), int(address[1])), family)
    server.set_app(application)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server
