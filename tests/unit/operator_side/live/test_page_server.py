"""The page's server: only on loopback, only with the key, only under loopback's names."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from http import HTTPStatus

import pytest

from holdfast.errors import ConfigError, StoreError
from operator_side.live.page_server import PageServer, Response


def pages(name: str, run: str) -> Response | None:
    if name == "broken":
        raise StoreError("the store is away")
    return Response(f"{name}|{run}".encode(), "text/html") if name in {"", "main"} else None


@contextlib.contextmanager
def serving() -> Iterator[PageServer]:
    server = PageServer(0, pages)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()


def get(server: PageServer, target: str, host: str = "localhost") -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", target, headers={"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers


def test_page_is_served_on_loopback_with_strict_headers() -> None:
    with serving() as server:
        assert server.url.startswith(f"http://127.0.0.1:{server.port}/")
        base = server.url.partition(str(server.port))[2]
        status, text, headers = get(server, f"{base}main?run=%2Fmnt%2Frun", f"localhost:{server.port + 1}")
        assert (status, text) == (200, "main|/mnt/run")
        assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in headers
        others = [one[4][0] for one in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
        for address in {one for one in others if not str(one).startswith("127.")}:
            with (
                pytest.raises(ConnectionRefusedError),
                socket.create_connection((str(address), server.port), timeout=5),
            ):
                pass


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "", "[::1", "0.0.0.0"]
)
def test_another_host_name_is_refused(host: str) -> None:
    with serving() as server:
        path = server.url.partition(str(server.port))[2]
        assert server.respond("127.0.0.1", path)[0] == HTTPStatus.OK
        status, served = server.respond(host, path)
        assert status == HTTPStatus.FORBIDDEN
        assert b"localhost only" in served.body


def test_server_tells_nothing_without_the_key() -> None:
    with serving() as server:
        for path in ("/", "/main", "//main", "/wrong/main", "main", "", "/\udcff/", "/é/"):
            status, served = server.respond("localhost", path)
            assert status == HTTPStatus.FORBIDDEN, path
            assert b"open the URL" in served.body


def test_an_unknown_page_is_missing_and_an_error_of_the_store_is_told() -> None:
    with serving() as server:
        base = server.url.partition(str(server.port))[2]
        assert server.respond("[::1]:80", f"{base}other")[0] == HTTPStatus.NOT_FOUND
        status, served = server.respond("localhost", f"{base}broken")
        assert (status, served.body) == (HTTPStatus.SERVICE_UNAVAILABLE, b"the store is away")


def test_a_taken_port_is_an_error_that_names_it() -> None:
    with serving() as server, pytest.raises(ConfigError, match=f"--port {server.port}: .*name another"):
        PageServer(server.port, pages)
