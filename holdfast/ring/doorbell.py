"""The doorbell between stager and flusher: small JSON messages over a unix SOCK_SEQPACKET socket.

    stager  ── hello, begin, chunk, staged, abort, doubt, proof, finish ───────────────────►  flusher
            ◄── welcome | refused, began, freed, grown, durable, verified, bad, failed, held, drained ──

docs/ring.md says what each message means. Nothing here blocks: a message that the socket does not accept waits in the
channel until `flush` or `poll`. A peer that is gone is not an error but a state, `closed`: both sides have their own
plan for it.

Every message is input from outside: its kind, its fields and their types are checked against `FIELDS` before use.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.errors import FencedError, PeerLost, ProtocolError

_log = logging.getLogger("holdfast.ipc")

VERSION = 6
SOCKET_NAME = "flusher.sock"
MESSAGE_BYTES_MAX = 64 * 1024
_OUTBOX_MESSAGES_MAX = 4096  # a peer that has not read this many is as good as dead
_WHOLE_MAX = 2**62
_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid of SO_PEERCRED
_RETRY_SECONDS = 0.02

# Kind → its fields and their types. A field that is missing or of another type is refused; unknown fields are ignored,
# so that a newer peer may send more.
FIELDS: dict[str, dict[str, type]] = {
    # stager → flusher
    # attempt 0: a new job. share: index and writers. lead_attempt: the attempt for a new job's ring, which the lead has
    # from its own flusher and the others from the lead; from the lead 0, or the attempt that its last process had.
    # standing: restarts within its job are possible
    "hello": {"version": int, "pid": int, "attempt": int, "share": list, "lead_attempt": int},
    "begin": {"attempt": int, "step": int, "layout_digest": str},
    "chunk": {"slot": int},
    "staged": {"attempt": int, "step": int},
    "abort": {"attempt": int, "step": int, "reason": str},
    "doubt": {},  # the file beside the ring names the steps
    "proof": {},  # the file beside the ring has the proofs
    "finish": {},  # interrupted: a rank was lost, or had notice of it
    # flusher → stager
    "welcome": {
        "version": int,
        "pid": int,
        "chunk_bytes": int,
        "ring_chunks": int,
        "attempt": int,
        "store_url": str,
        "resumed": bool,  # seen: earlier failures (holdfast/wire/failure_count.py)
    },
    "refused": {"code": str, "message": str},
    "began": {"attempt": int, "step": int, "part_chunks": int},
    "freed": {"slots": list},
    "grown": {"note": str},  # the journal has the new size
    "durable": {"attempt": int, "step": int, "file": str, "pgt2_seconds": float, "record": dict},
    "verified": {"attempt": int, "step": int},
    "bad": {"attempt": int, "step": int, "note": str},
    "failed": {"attempt": int, "step": int, "code": str, "message": str},
    "held": {"message": str},  # why the store fails; empty: it works again
    "drained": {},
    # request and answer of `holdfast status`, over another socket (holdfast/telemetry/status_socket.py)
    "status": {"version": int},
    "state": {"document": dict},
}


class Message(NamedTuple):
    """One message; `fields` has at least what `FIELDS` names for its kind, of those types."""

    kind: str
    fields: dict[str, Any]

    @classmethod
    def from_bytes(cls, data: bytes) -> Message:
        """Read one packet. Raises a `ProtocolError` that names kind and field."""
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"message of {len(data)} bytes is not JSON: {error}") from error
        kind = document.get("kind") if isinstance(document, dict) else None
        if not isinstance(kind, str) or kind not in FIELDS:
            raise ProtocolError(
                f"message of unknown kind {kind!r:.60}; install the same version of holdfast for both processes"
            )
        for name, expected in FIELDS[kind].items():
            _check(kind, name, expected, document.get(name))
        return cls(kind, document)

    def to_bytes(self) -> bytes:
        """Return the packet. Raises `ProtocolError`: a field is missing, or the packet is too large."""
        for name, expected in FIELDS[self.kind].items():
            _check(self.kind, name, expected, self.fields.get(name))
        data = json.dumps({"kind": self.kind, **self.fields}, separators=(",", ":")).encode()
        if len(data) > MESSAGE_BYTES_MAX:
            raise ProtocolError(
                f"message {self.kind} of {len(data)} bytes, expected at most {MESSAGE_BYTES_MAX}"
            )
        return data


def _check(kind: str, name: str, expected: type, value: Any) -> None:
    allowed = (int, float) if expected is float else (expected,)
    if type(value) not in allowed:
        raise ProtocolError(f"message {kind}: field {name} is {value!r:.60}, expected {expected.__name__}")
    if expected is int and not 0 <= value < _WHOLE_MAX:
        raise ProtocolError(f"message {kind}: field {name} is {value!r:.60}, expected 0 to 2^62")
    if expected is list and not all(type(item) is int and 0 <= item < _WHOLE_MAX for item in value):
        raise ProtocolError(
            f"message {kind}: field {name} has an item that is no whole number from 0 to 2^62"
        )


class Channel:
    """One end of a connection. Non-blocking; for one thread. `closed`: the peer is gone, or `close` was called. `poll`
    first returns all messages that the peer sent before its end.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._outbox: deque[bytes] = deque()
        self._protocol_error: ProtocolError | None = None
        self.closed = False
        self.peer_pid = _check_peer(connection)

    def fileno(self) -> int:
        """For `selectors`; -1 once closed."""
        return self._socket.fileno()

    @property
    def unsent(self) -> int:
        """Messages that the socket has not accepted yet: wait for it to be writable, then `flush`."""
        return 0 if self.closed else len(self._outbox)

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message, or keep it until `flush`; to a peer that is gone, do nothing (see `closed`). Raises
        `ProtocolError` if the message is not as in `FIELDS` (a bug of ours).
        """
        data = Message(kind, fields).to_bytes()
        if self.closed:
            return
        if len(self._outbox) >= _OUTBOX_MESSAGES_MAX:
            _log.warning(
                "process %d has not read %d messages and is considered lost", self.peer_pid, len(self._outbox)
            )
            self.close()
            return
        self._outbox.append(data)
        self.flush()

    def flush(self) -> None:
        """Send waiting messages, as far as the socket accepts them."""
        while self._outbox and not self.closed:
            try:
                self._socket.send(self._outbox[0], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError as error:
                # The peer's last messages are still in the socket: `poll` reads them and then sees the end.
                _log.debug("peer %d is gone: %s", self.peer_pid, error)
                self._outbox.clear()
                return
            self._outbox.popleft()

    def poll(self, *, most: float = math.inf) -> list[Message]:
        """Return the messages that have arrived, at most `most`, and flush. When the peer has gone, set `closed`.
        Raises `ProtocolError` after a message that the protocol does not allow: close the channel. Messages before it
        were returned by earlier calls.
        """
        self.flush()
        messages: list[Message] = []
        while not self.closed and self._protocol_error is None and len(messages) < most:
            try:
                data, _, flags, _ = self._socket.recvmsg(MESSAGE_BYTES_MAX)
            except BlockingIOError:
                break
            except OSError as error:
                _log.debug("peer %d is gone: %s", self.peer_pid, error)
                data, flags = b"", 0
            if not data:
                self.close()
                break
            try:
                if flags & socket.MSG_TRUNC:
                    raise ProtocolError(
                        f"message from process {self.peer_pid} is above {MESSAGE_BYTES_MAX} bytes"
                    )
                messages.append(Message.from_bytes(data))
            except ProtocolError as error:
                self._protocol_error = error
        if self._protocol_error is not None and not messages:
            raise self._protocol_error
        return messages

    def close(self) -> None:
        """Close the connection, and drop unsent and unread messages. May be called twice."""
        if not self.closed:
            self.closed = True
            self._outbox.clear()
            # Closing a unix socket with unread packets resets it, and the peer would lose our last messages.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
                while self._socket.recv(1):
                    pass
        self._socket.close()


class Listener:
    """The flusher's end: accepts one stager at a time. `path`: where the socket appears, in a private directory. A
    stale socket is replaced, so only the process that holds the run's lock may do this.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        # Bound under another name first, so that connecting works as soon as the name appears.
        temporary = path.with_name(f".new-{os.getpid()}")
        temporary.unlink(missing_ok=True)
        try:
            with _short_path(temporary) as name:
                self._socket.bind(name)
            self._socket.listen(8)
            self._socket.setblocking(False)
            temporary.chmod(0o600)
            temporary.rename(path)
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """For `selectors`."""
        return self._socket.fileno()

    def accept(self, *, busy: str = "") -> Channel | None:
        """Return the next connection; None if no connection waits, or it was refused. `busy`: why no further stager is
        wanted now, as the reason of its refusal.
        """
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        try:
            channel = Channel(connection)
        except ProtocolError as error:
            _log.warning("%s", error)
            connection.close()
            return None
        if busy:
            channel.send("refused", code=FencedError.code, message=busy)
            channel.close()
            return None
        return channel

    def close(self) -> None:
        """Stop listening and remove the socket."""
        self._socket.close()
        self.path.unlink(missing_ok=True)


def connect(path: Path, *, wait_seconds: float = 0.0) -> Channel:
    """Connect to the flusher whose socket is `path`, without sending anything. The stager's end. `wait_seconds`: how
    long to wait for the socket to appear. Raises `PeerLost`: no process listens there; `ProtocolError`: the listener is
    another user's process.
    """
    deadline = time.monotonic() + wait_seconds
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            with _short_path(path) as name:
                connection.connect(name)
            return Channel(connection)
        except ProtocolError:
            connection.close()
            raise
        except OSError as error:
            connection.close()
            is_absent = error.errno in {errno.ENOENT, errno.ECONNREFUSED}
            if not is_absent or time.monotonic() >= deadline:
                raise PeerLost(
                    f"no flusher listens on {path}: {error.strerror} (waited {wait_seconds} s); the flusher's log says "
                    "why it ended; start the job again, and the stager starts a new flusher"
                ) from error
        time.sleep(_RETRY_SECONDS)


@contextlib.contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """A name for `path` that fits the 107 bytes of a unix socket address, however deep its directory lies."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def _check_peer(connection: socket.socket) -> int:
    """Return the peer's pid. Raises `ProtocolError` unless it is a process of this user, or of root."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    if uid not in {os.geteuid(), 0}:
        raise ProtocolError(f"peer process {pid} belongs to uid {uid}, expected {os.geteuid()}")
    return int(pid)
