"""One small request to a metadata server: bounded in time and bytes, no proxy, no redirect.

The address is link-local and plain http on every cloud. A proxy set for the training would answer for its own machine,
and a redirect would lead away from this machine, so neither is used.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from trainer_side.notice.watch import SourceError

_BODY_BYTES_MAX = 64 * 1024


@dataclass(frozen=True, slots=True)
class HttpResponse:
    status: int
    body: str


class MetadataServer:
    """A metadata server at `http://host[:port][/path]`. SourceError: the URL is malformed.

    A request may take `seconds_max`, from its first byte to its last.
    """

    def __init__(self, url: str, *, seconds_max: float) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port or 80
        except ValueError:
            port = 0
        if parts.scheme != "http" or not parts.hostname or not port or parts.query or parts.fragment:
            raise SourceError(f"metadata server {url!r:.200}: expected http://HOST[:PORT][/PATH]")
        self.url = url.rstrip("/")
        self._host, self._port, self._path = parts.hostname, port, parts.path.rstrip("/")
        self._seconds_max = seconds_max

    def request(
        self, path: str, *, method: str = "GET", headers: Mapping[str, str] | None = None
    ) -> HttpResponse:
        """Request `path`. SourceError: refused, late, cut off, a redirect, a server error, or too large an answer."""
        what = f"{method} {self.url}{path}"
        too_late = f"{what}: the server did not send a whole answer within {self._seconds_max:g} s"
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._seconds_max)
        # A socket's timeout holds for each read; a server that sends byte by byte needs a limit for the whole answer.
        late = threading.Event()
        timer = threading.Timer(self._seconds_max, _abort, (connection, late))
        timer.daemon = True
        timer.start()
        try:
            connection.request(method, self._path + path, headers=dict(headers or {}))
            response = connection.getresponse()
            body = response.read(_BODY_BYTES_MAX + 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if late.is_set() or isinstance(error, TimeoutError):
                raise SourceError(too_late) from error
            raise SourceError(f"{what}: {type(error).__name__}: {error}") from error
        finally:
            timer.cancel()
            connection.close()
        if late.is_set():
            raise SourceError(too_late)
        if len(body) > _BODY_BYTES_MAX:
            raise SourceError(
                f"{what}: expected an answer of at most {_BODY_BYTES_MAX} bytes, got a longer one"
            )
        if 300 <= response.status < 400:
            raise SourceError(f"{what}: answered with a redirect ({response.status}), which is not followed")
        if response.status >= 500 or response.status == 429:
            raise SourceError(f"{what}: answered {response.status}")
        return HttpResponse(response.status, body.decode("utf-8", errors="replace"))


def _abort(connection: http.client.HTTPConnection, late: threading.Event) -> None:
    late.set()
    open_socket = connection.sock
    if open_socket is not None:
        with contextlib.suppress(OSError):  # already closed
            open_socket.shutdown(socket.SHUT_RDWR)


def json_object(text: str, where: str) -> dict[str, Any]:
    """Parse the JSON object in an answer. SourceError: it is malformed."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{where}: expected a JSON object, got {text!r:.80}: {error}") from error
    if not isinstance(document, dict):
        raise SourceError(f"{where}: expected a JSON object, got {text!r:.80}")
    return document


def unix_time(text: object, where: str) -> float:
    """Parse `2017-09-18T08:22:00Z` or `Mon, 19 Sep 2016 18:29:47 GMT` to seconds since 1970. SourceError: neither."""
    if isinstance(text, str) and len(text) < 64:
        for parse in (datetime.fromisoformat, parsedate_to_datetime):
            try:
                moment = parse(text.strip())
                return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
            except (ValueError, TypeError, IndexError, OverflowError):
                continue
    raise SourceError(f"{where}: expected a time such as 2017-09-18T08:22:00Z, got {text!r:.80}")
