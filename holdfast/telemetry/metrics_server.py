"""The server of HTTP behind `/metrics`: few connections, none of which may stay silent for long."""

from __future__ import annotations

import socket
import threading
import time
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

# one Prometheus asks over one; each costs a descriptor, which the ring and the store need, too
_CONNECTIONS_MAX = 8
_SILENT_SECONDS_MAX = 5.0  # a connection that says nothing, or takes nothing, is closed after that
_NO_DESCRIPTOR_SECONDS = 0.5


class _Handler(WSGIRequestHandler):
    timeout = _SILENT_SECONDS_MAX

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as its base
        """A scrape is no news."""


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, and few of them: what comes beyond is closed at once."""

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
            time.sleep(_NO_DESCRIPTOR_SECONDS)  # the connection still waits, and would be taken at once
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Somebody hung up in the middle, or said nothing for too long."""


def start_server(host: str, port: int, application: WSGIApplication) -> _Server:
    """Answer by `application`, in threads of its own. Raises `OSError`: the port cannot be had."""
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    server = _Server((str(address[0]), int(address[1])), family)
    server.set_app(application)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server
