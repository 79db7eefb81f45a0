"""Serves the live page on loopback, to clients that have its key.

A browser on another machine connects through ssh. Three things keep others out: the socket is bound only to 127.0.0.1;
the path begins with a key that only the command prints, because other users of this machine reach its loopback; and the
Host header must name loopback, so that no web site can let its own name resolve to this server.
"""

from __future__ import annotations

import hmac
import secrets
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from holdfast.errors import ConfigError, HoldfastError

ADDRESS = "127.0.0.1"
_HOSTS = frozenset({ADDRESS, "localhost", "::1"})
_SILENT_SECONDS_MAX = 30.0
_POLL_SECONDS = 0.1  # for `close`
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the page itself sets the rest of the policy
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Response(NamedTuple):
    """Body and type of an answer."""

    body: bytes
    content_type: str


Pages = Callable[[str, str], Response | None]
"""(name, run) → the content under this name ("": the page) for this run ("": the newest); None: not found."""


class PageServer:
    """An HTTP server for one page, at any free port if `port` is 0. Calls `pages` in one thread at a time. Raises
    `ConfigError`: the port is taken.
    """

    def __init__(self, port: int, pages: Pages) -> None:
        self._key, self._pages = secrets.token_urlsafe(16), pages
        self._lock = threading.Lock()
        try:
            self._server = _LoopbackServer((ADDRESS, port), self._handler())
        except OSError as error:
            raise ConfigError(
                f"--port {port}: this port of {ADDRESS} cannot be used: {error.strerror}; name another one, or 0"
            ) from error
        self.port = int(self._server.server_address[1])
        self.url = f"http://{ADDRESS}:{self.port}/{self._key}/"

    def serve(self) -> None:
        """Serve until another thread calls `close()`, or an exception interrupts this one."""
        self._server.serve_forever(_POLL_SECONDS)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def respond(self, host: str, target: str) -> tuple[HTTPStatus, Response]:
        """Answer a request for `target` with the Host header `host`."""
        if not _is_loopback(host):
            return _text_response(
                HTTPStatus.FORBIDDEN, f"this page is served for {ADDRESS} and localhost only"
            )
        path, _, query = target.partition("?")
        key, _, name = path.removeprefix("/").partition("/")
        if not hmac.compare_digest(key.encode(errors="replace"), self._key.encode()):
            return _text_response(
                HTTPStatus.FORBIDDEN, "open the URL that `holdfast status --web` has printed: it has a key"
            )
        try:
            with self._lock:
                found = self._pages(name, parse_qs(query).get("run", [""])[0])
        except HoldfastError as error:
            return _text_response(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        if found is None:
            return _text_response(HTTPStatus.NOT_FOUND, "there is no such page")
        return HTTPStatus.OK, found

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            timeout = _SILENT_SECONDS_MAX
            server_version, sys_version = "holdfast", ""

            def do_GET(self) -> None:  # the name is http.server's
                status, response = server.respond(self.headers.get("Host", ""), self.path)
                self.send_response(status)
                headers = {
                    "Content-Type": f"{response.content_type}; charset=utf-8",
                    "Content-Length": str(len(response.body)),
                }
                for name, value in (headers | _HEADERS).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(response.body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as its base
                """Do not log requests."""

        return Handler


class _LoopbackServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that closed its connection; report other errors, which are bugs."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def _is_loopback(host: str) -> bool:
    try:
        return urlsplit(f"//{host}").hostname in _HOSTS
    except ValueError:
        return False


def _text_response(status: HTTPStatus, text: str) -> tuple[HTTPStatus, Response]:
    return status, Response(text.encode(), "text/plain")
