"""A proxy between an S3 client and a real S3 server that injects the faults of networks and servers.

    client ──► FaultProxy ──► server         rule: which operation, the n-th one on, how many, how likely
                   │ before the server: reset, cut in the request body, 429, 500, 503, 409, error in a 200
                   │ after the server:  answer lost, answer never comes, answer cut short, one byte wrong
                   └─ records every request with its time, so that a test can count them and look at the waits

Requests pass through byte for byte, `Host` too, so signatures stay valid and the server checks them. Each random
choice depends only on the seed and on the request (operation, key, part, how often), not on thread timing.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import http.client
import logging
import re
import select
import socket
import socketserver
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

__all__ = ["Fault", "FaultProxy", "Request", "Rule", "running_proxy"]

_log = logging.getLogger("holdfast.tests.fault_proxy")
_PIECE_BYTES = 64 * 1024
_STALL_SECONDS_MAX = 60.0
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "expect"})


class Fault(enum.Enum):
    """A fault that hits one request."""

    RESET_BEFORE = "reset before the request reached the server"
    RESET_MIDWAY = "reset when the server had half of the request's body"
    LOST_ANSWER = "reset after the server did it"
    STALL = "the server did it, and its answer never comes"
    INTERNAL_ERROR = "500 InternalError"
    UNAVAILABLE = "503 of a balancer, without XML"
    SLOW_DOWN = "503 SlowDown"
    TOO_MANY = "429 with Retry-After"
    CONFLICT = "409 ConditionalRequestConflict"
    ERROR_IN_200 = "200 with an error as its body"
    TRUNCATED = "the answer ends before the promised length"
    WRONG_BYTE = "one byte of the answer is another one"


_ANSWERS: dict[Fault, tuple[int, str]] = {
    Fault.INTERNAL_ERROR: (500, "InternalError"),
    Fault.UNAVAILABLE: (503, ""),
    Fault.SLOW_DOWN: (503, "SlowDown"),
    Fault.TOO_MANY: (429, "TooManyRequests"),
    Fault.CONFLICT: (409, "ConditionalRequestConflict"),
    Fault.ERROR_IN_200: (200, "InternalError"),
}


@dataclass(frozen=True)
class Rule:
    """Assigns a fault to matching requests.

    Attributes:
        operation: Name of the S3 operation, such as `UploadPart`; "" for all.
        key: Suffix of the object's key.
        first: The first request that is hit, counted from 1 among those that match operation and key.
        times: How many requests are hit from there on; None for all.
        probability: Chance of a hit, for each of these.
    """

    fault: Fault
    operation: str = ""
    key: str = ""
    first: int = 1
    times: int | None = 1
    probability: float = 1.0


@dataclass(frozen=True)
class Request:
    """A request that the proxy received.

    Attributes:
        at: `time.monotonic` of its arrival.
        operation: Name of the S3 operation.
        key: The object's key, or the prefix that is listed.
        part: The part's number, or 0.
        fault: The fault that hit it, if any.
    """

    at: float
    operation: str
    key: str
    part: int
    fault: Fault | None


@dataclass
class _Armed:
    rule: Rule
    seen: int = 0
    per_place: Counter[tuple[str, str, int]] = field(default_factory=Counter)


class FaultProxy:
    """The proxy. Rules may be added and removed while it runs.

    Args:
        server: URL of the server, `http://host:port`.
        seed: For the random choices of all rules.

    Attributes:
        bytes_per_second: Speed of request bodies, over all connections; None: unlimited.
    """

    def __init__(self, server: str, *, seed: int = 0) -> None:
        self.server = urlsplit(server)
        self.bytes_per_second: float | None = None
        self._seed = seed
        self._lock = threading.Lock()
        self._armed: list[_Armed] = []
        self._requests: list[Request] = []
        self._passing = threading.Lock()
        self.stopping = threading.Event()
        proxy = self

        class Handler(_Handler):
            """Knows its proxy."""

            owner = proxy

        self._listening = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._listening.serve_forever, args=(0.05,), name="fault-proxy"
        )

    @property
    def endpoint(self) -> str:
        """URL for clients."""
        return f"http://127.0.0.1:{self._listening.server_address[1]}"

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """Stop serving; stalled answers end."""
        self.stopping.set()
        self._listening.shutdown()
        self._thread.join()
        self._listening.server_close()

    def add(self, *rules: Rule) -> None:
        """Add rules. The first rule that hits a request wins."""
        with self._lock:
            self._armed += [_Armed(rule) for rule in rules]

    def clear(self) -> None:
        """Remove all rules."""
        with self._lock:
            self._armed.clear()

    def requests(self, operation: str = "", key: str = "", part: int | None = None) -> list[Request]:
        """Requests so far, in order, filtered by operation, suffix of the key, and part."""
        with self._lock:
            return [
                request
                for request in self._requests
                if operation in ("", request.operation)
                and request.key.endswith(key)
                and part in (None, request.part)
            ]

    def hits(self, fault: Fault | None = None) -> list[Request]:
        """Requests that a fault has hit."""
        return [r for r in self.requests() if r.fault is not None and fault in (None, r.fault)]

    def decide(self, operation: str, key: str, part: int) -> Fault | None:
        """Record a request; return its fault."""
        with self._lock:
            fault = next(
                filter(None, (self._hit(armed, operation, key, part) for armed in self._armed)), None
            )
            self._requests.append(Request(time.monotonic(), operation, key, part, fault))
        return fault

    def pace(self, nbytes: int) -> None:
        """Wait as long as `nbytes` take on a slow line; all connections share the line."""
        if self.bytes_per_second is not None:
            with self._passing:
                self.stopping.wait(nbytes / self.bytes_per_second)

    def _hit(self, armed: _Armed, operation: str, key: str, part: int) -> Fault | None:
        rule = armed.rule
        if rule.operation not in ("", operation) or not key.endswith(rule.key):
            return None
        armed.seen += 1
        last = None if rule.times is None else rule.first + rule.times - 1
        if armed.seen < rule.first or (last is not None and armed.seen > last):
            return None
        place = (operation, _steady(key), part)
        armed.per_place[place] += 1
        return rule.fault if self._chance(place, armed.per_place[place]) < rule.probability else None

    def _chance(self, place: tuple[str, str, int], time_number: int) -> float:
        digest = hashlib.sha256(repr((self._seed, place, time_number)).encode()).digest()
        return float(int.from_bytes(digest[:8], "big") / 2**64)


def _steady(key: str) -> str:
    """The key without its random part, so that the seed alone decides which requests are hit."""
    return re.sub(r"/check-.*", "/check", key)


@contextlib.contextmanager
def running_proxy(server: str, *, seed: int = 0) -> Iterator[FaultProxy]:
    """A proxy in front of `server`, stopped at the end."""
    proxy = FaultProxy(server, seed=seed)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False  # an idle connection of a client's pool must not block the end
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log only at debug level: clients that disconnect midway are normal here."""
        _log.debug("connection of %s ended", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    owner: FaultProxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        _log.debug(format, *args)

    def _serve(self) -> None:
        operation, key, part = _what(self.command, self.path)
        fault = self.owner.decide(operation, key, part)
        left = int(self.headers.get("Content-Length") or 0)
        if fault is Fault.RESET_BEFORE:
            self._reset()
        elif fault in _ANSWERS:
            self._drain(left)
            self._answer(*_ANSWERS[fault])
        else:
            self._forward(fault, left)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815 - the base class looks for these names

    def _forward(self, fault: Fault | None, left: int) -> None:
        server = self.owner.server
        upstream = http.client.HTTPConnection(str(server.hostname), server.port, timeout=_STALL_SECONDS_MAX)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in _HOP_BY_HOP:
                    upstream.putheader(name, value)
            if "Content-Length" in self.headers:
                upstream.putheader("Content-Length", str(left))
            upstream.endheaders()
            until = left // 2 if fault is Fault.RESET_MIDWAY else 0
            while left > until:
                piece = self.rfile.read(min(_PIECE_BYTES, left - until))
                if not piece:
                    self.close_connection = True
                    return
                self.owner.pace(len(piece))
                upstream.send(piece)
                left -= len(piece)
            if fault is Fault.RESET_MIDWAY:
                self._reset()
                return
            self._give_back(upstream.getresponse(), fault)
        finally:
            upstream.close()

    def _give_back(self, response: http.client.HTTPResponse, fault: Fault | None) -> None:
        if fault in (Fault.LOST_ANSWER, Fault.STALL):
            response.read()
            if fault is Fault.STALL:
                self._stall()
            self._reset()
            return
        bodiless = self.command == "HEAD" or response.status in (204, 304)
        promised = response.getheader("Content-Length")
        whole = b"" if bodiless or promised is not None else response.read()
        self.send_response_only(response.status, response.reason)
        for name, value in response.getheaders():
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        length = int(promised) if promised is not None else len(whole)
        if not (bodiless and promised is None):
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if bodiless:
            return
        if fault is Fault.TRUNCATED:
            self._pass_body(response, whole, length // 2, wrong_at=-1)
            self.close_connection = True
        else:
            self._pass_body(
                response, whole, length, wrong_at=length // 2 if fault is Fault.WRONG_BYTE else -1
            )

    def _pass_body(
        self, response: http.client.HTTPResponse, whole: bytes, nbytes: int, *, wrong_at: int
    ) -> None:
        done = 0
        while done < nbytes:
            size = min(_PIECE_BYTES, nbytes - done)
            piece = whole[done : done + size] if whole else response.read(size)
            if not piece:
                self.close_connection = True
                return
            if done <= wrong_at < done + len(piece):
                altered = bytearray(piece)
                altered[wrong_at - done] ^= 0x20
                piece = bytes(altered)
            self.wfile.write(piece)
            done += len(piece)

    def _answer(self, status: int, code: str) -> None:
        body = b"<html>balancer</html>"
        if code:
            body = (
                '<?xml version="1.0" encoding="UTF-8"?>\n'
                f"<Error><Code>{code}</Code><Message>as the test wants it</Message></Error>"
            ).encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml" if code else "text/html")
        self.send_header("Content-Length", str(len(body)))
        if status in (429, 503):
            self.send_header("Retry-After", "1")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _drain(self, left: int) -> None:
        while left:
            piece = self.rfile.read(min(_PIECE_BYTES, left))
            if not piece:
                break
            left -= len(piece)

    def _stall(self) -> None:
        """Wait until the client gives up."""
        until = time.monotonic() + _STALL_SECONDS_MAX
        while time.monotonic() < until and not self.owner.stopping.is_set():
            if select.select([self.connection], [], [], 0.1)[0]:
                return

    def _reset(self) -> None:
        """Close with RST, as a kernel does that has no record of the connection."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        # A second handle, which rfile and wfile keep, would keep the connection open.
        self.rfile.close()
        with contextlib.suppress(OSError, ValueError):
            self.wfile.close()
        self.connection.close()
        self.rfile = self.wfile = _Gone()  # type: ignore[assignment]


class _Gone:
    """Replaces the files that the base class flushes and closes after a reset."""

    closed = True

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def _what(method: str, target: str) -> tuple[str, str, int]:
    """Operation, key (or listed prefix) and part number of a request in path style."""
    url = urlsplit(target)
    query = parse_qs(url.query, keep_blank_values=True)
    _, _, key = unquote(url.path).lstrip("/").partition("/")
    part = int(query.get("partNumber", ["0"])[0])
    if not key:
        prefix = query.get("prefix", [""])[0]
        return ("ListMultipartUploads" if "uploads" in query else f"{method}Bucket", prefix, 0)
    if "uploads" in query:
        return "CreateMultipartUpload", key, 0
    if "uploadId" in query:
        name = {"PUT": "UploadPart", "POST": "CompleteMultipartUpload", "DELETE": "AbortMultipartUpload"}
        return name.get(method, "ListParts"), key, part
    return f"{method.capitalize()}Object", key, 0
