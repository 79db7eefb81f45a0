"""The thread that answers `holdfast status`, over a socket beside the ring.

    status ─► flusher-status.sock ─► state       one packet each way, at most 64 KiB, in the format of doorbell.py
    status ─► stager-status.sock  ─► state

The role's main loop is not involved: a client can neither block it nor take a stager's place at its socket. Requests
within a short time get the same answer, so a hundred watchers cost no more than one. A failure here only logs a line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from holdfast.errors import PeerLost, ProtocolError
from holdfast.ring.doorbell import MESSAGE_BYTES_MAX, Channel, Listener, connect
from holdfast.telemetry.status_document import StatusDocument, read_status

_log = logging.getLogger("holdfast.status")

_VERSION = 1
_WATCHERS_MAX = 32  # beyond this, disconnect the client with the oldest request; it reconnects
_SAME_ANSWER_SECONDS = 0.2
_DOCUMENT_BYTES_MAX = MESSAGE_BYTES_MAX - 256  # with its envelope


def socket_path(directory: Path, role: Literal["stager", "flusher"]) -> Path:
    """Return the path of the role's socket; `directory` is the run's runtime directory."""
    return directory / f"{role}-status.sock"


@contextmanager
def serve_status(
    directory: Path, role: Literal["stager", "flusher"], build_document: Callable[[], StatusDocument]
) -> Iterator[None]:
    """Answer `holdfast status` inside the block. `build_document` is called in the status thread."""
    try:
        listener = Listener(socket_path(directory, role))
    except OSError as error:
        _log.warning("`holdfast status` cannot ask this %s: %s: %s", role, directory, error.strerror or error)
        yield
        return
    server = _StatusServer(listener, build_document)
    thread = threading.Thread(target=server.run, name="status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.stop()
        thread.join()
        server.close()
        listener.close()


class _StatusServer:
    """The loop of the status thread."""

    def __init__(self, listener: Listener, build_document: Callable[[], StatusDocument]) -> None:
        self._listener, self._build_document = listener, build_document
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._channels: dict[Channel, None] = {}  # ordered by their newest request, newest last
        self._selector = selectors.DefaultSelector()
        self._cached_document: dict[str, Any] = {}
        self._cached_until = 0.0

    def stop(self) -> None:
        """Tell the thread to end. Any thread."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close the descriptor. Call after the thread has ended."""
        os.close(self._wake)

    def run(self) -> None:
        """Accept and answer, until `stop`."""
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            while True:
                ready = {key.fileobj for key, _ in self._selector.select()}
                if self._wake in ready:
                    return
                if self._listener in ready:
                    self._accept()
                for channel in [channel for channel in self._channels if channel in ready]:
                    self._serve(channel)
        except Exception:  # noqa: BLE001 - a bug in the status must not stop the process
            _log.warning("`holdfast status` is no longer answered here", exc_info=True)
        finally:
            for channel in list(self._channels):
                self._disconnect(channel)
            self._selector.close()

    def _accept(self) -> None:
        channel = self._listener.accept()
        if channel is None:
            return
        while len(self._channels) >= _WATCHERS_MAX:
            self._disconnect(next(iter(self._channels)))
        self._channels[channel] = None
        self._selector.register(channel, selectors.EVENT_READ)

    def _serve(self, channel: Channel) -> None:
        try:
            messages = channel.poll()
            if any(message.kind != "status" for message in messages):
                raise ProtocolError(f"process {channel.peer_pid} sent something other than a status request")
            # A client that does not read its answers gets no more, and is disconnected.
            if messages and not channel.unsent:
                self._channels[channel] = self._channels.pop(channel)
                channel.send("state", document=self._document())
        except ProtocolError as error:
            _log.info("%s; its connection is closed", error)
            self._disconnect(channel)
            return
        if channel.closed or channel.unsent:
            self._disconnect(channel)

    def _disconnect(self, channel: Channel) -> None:
        self._channels.pop(channel, None)
        # For a closed socket, epoll has already dropped the descriptor, but the selector keeps its key.
        for key in list(self._selector.get_map().values()):
            if key.fileobj is channel:
                self._selector.unregister(channel)
        channel.close()

    def _document(self) -> dict[str, Any]:
        now = time.monotonic()
        if now >= self._cached_until:
            self._cached_document = shrink_to_fit(self._build_document().model_dump(mode="json"))
            self._cached_until = now + _SAME_ANSWER_SECONDS
        return self._cached_document


def shrink_to_fit(document: dict[str, Any], bytes_max: int = _DOCUMENT_BYTES_MAX) -> dict[str, Any]:
    """Halve the longest lists of a document until it fits a packet; keep the newest entries and worst ranks."""
    document = dict(document)
    while len(json.dumps(document, separators=(",", ":"))) > bytes_max:
        lists = {
            name: len(json.dumps(value))
            for name, value in document.items()
            if isinstance(value, list) and value
        }
        if not lists:
            raise ProtocolError(f"expected a status of at most {bytes_max} bytes, got a longer one")
        name = max(lists, key=lambda name: lists[name])
        rows = document[name]
        document[name] = rows[: len(rows) // 2] if name == "ranks" else rows[len(rows) - len(rows) // 2 :]
    return document


def request_status(path: Path, *, seconds_max: float) -> StatusDocument | None:
    """Ask the process at `path`, if there is one. Raises `PeerLost`: no answer; `ProtocolError`: a wrong answer."""
    try:
        channel = connect(path)
    except (PeerLost, OSError):  # even the directory may be missing
        return None
    with contextlib.closing(channel), selectors.DefaultSelector() as selector:
        channel.send("status", version=_VERSION)
        selector.register(channel, selectors.EVENT_READ)
        deadline = time.monotonic() + seconds_max
        while (left_seconds := deadline - time.monotonic()) > 0:
            selector.select(left_seconds)
            for message in channel.poll():
                if message.kind == "state":
                    return read_status(message.fields["document"], str(path))
            if channel.closed:
                return None  # the process has just ended
        raise PeerLost(f"process {channel.peer_pid} does not answer within {seconds_max:g} s")
