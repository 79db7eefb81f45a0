"""Accepts connections for a standing stager, and finds the job that each belongs to.

    accepted ─► handshake, within 10 s ─► of the current job ─────────────────────────► its port
                                       ├─ of the same launch, started again ──────────► the next job; this one ends
                                       ├─ of the same start, a later generation ──────► the next job; this one ends
                                       ├─ of another launch, the current job gone ────► the next job; this one ends
                                       ├─ of another launch, the current job alive ───► refused: BUSY
                                       └─ no job is served ───────────────────────────► the next job

Ranks of the next job wait for their answer until that job is served. An incarnation that was replaced stays out for
good: its processes may have been frozen, and wake up late. Ranks that have lost this stager, or its predecessor, return
as the next generation of their incarnation; they never replace another start of their launch.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import socket
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.errors import ConfigError, HoldfastError, ProtocolError
from holdfast.net.address import Address
from holdfast.net.handshake import (
    GENERATION_MAX,
    HELLO_BYTES_MAX,
    HELLO_BYTES_MIN,
    MESSAGES_CHANNEL,
    NONCE_BYTES,
    PROOF_MESSAGE_BYTES,
    Hello,
    Status,
    VersionMismatch,
    challenge,
    check_proof,
    hello_bytes,
    is_hello,
    read_hello,
    rejection,
)
from holdfast.net.tls import HANDSHAKE_RECORD, NO_TLS_HERE, AnySocket, StagerTls, TlsSocket, enable_keepalive
from stager.reactor import Reactor
from stager.tcp import TcpTrainersPort, refuse

_log = logging.getLogger("holdfast.stager.job_listener")

_BACKLOG = 1024
_ACCEPTED_PER_TURN_MAX = 64
_GREETINGS_MAX = 256  # connections that have not proved the key; beyond this the oldest is closed
_GREETING_SECONDS_MAX = 10.0
_ENDED_JOBS_MAX = 4096
_ALL_GENERATIONS = GENERATION_MAX + 1
_RESTARTED = "its job was started again"
_UNKNOWN = (
    "this stager does not know its job: it was started after it, or the job is over or goes on without it"
)
_TLS_HELLO_BYTES_MAX = 16 * 1024
_REFUSAL_LOG_SECONDS = 10.0  # between two log lines about refused connections
_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@dataclass(slots=True)
class _Greeting:
    """A connection that has not proved the key."""

    sock: AnySocket
    peer: str
    deadline: float
    buffer: bytearray = field(default_factory=bytearray)
    hello: Hello | None = None
    hello_data: bytes = b""
    nonce: bytes = b""
    in_tls_handshake: bool = False


@dataclass(slots=True)
class _Waiting:
    """A connection of the next job."""

    sock: AnySocket
    hello: Hello
    received: int


class _EndedJob(NamedTuple):
    """A start of a job that has ended, up to this generation."""

    launch: str
    generation: int


def listen(address: Address) -> socket.socket:
    """Open a listening socket. Raises `ConfigError`: the address is not of this machine, or is in use."""
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, sockaddr = found[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(sockaddr)
        sock.listen(_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"stager setting listen: {address}: {error.strerror or error}; give an address of this machine and a free "
            "port"
        ) from None
    sock.setblocking(False)
    return sock


class JobListener:
    """Assigns connections to the current job or the next one. One thread; no method blocks.

    Args:
        key: Key of the run; empty without a key.
        ranks: How many ranks a job must have; None accepts the number that its first rank states.
        tls: Ranks must speak TLS; None: they must not.

    Attributes:
        turned_away: Ranks that have connected since `stop_accepting`, and were told that the stager is stopping.
    """

    def __init__(
        self,
        sock: socket.socket,
        reactor: Reactor,
        key: bytes,
        *,
        ranks: int | None,
        tls: StagerTls | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sock, self._reactor, self._clock = sock, reactor, clock
        self._key, self._expected_ranks, self._tls = key, ranks, tls
        self._greetings: OrderedDict[AnySocket, _Greeting] = OrderedDict()
        self._waiting: dict[AnySocket, _Waiting] = {}
        self._ended_jobs: OrderedDict[bytes, _EndedJob] = OrderedDict()  # by incarnation
        self._current: TcpTrainersPort | None = None
        self._share_refusal: Callable[[Hello], HoldfastError | None] = lambda _: None
        self._ending = False
        self.turned_away: set[int] = set()
        self._refusal_logged_at = -_REFUSAL_LOG_SECONDS
        self._unlogged_refusals = 0
        reactor.watch(sock, self._accept)
        reactor.add_turn_callback(self._close_overdue)  # while a job is served, too

    # -- jobs --------------------------------------------------------------------------------------------------------

    def next_job(self) -> Hello | None:
        """The HELLO of the next job's first rank; None until one has connected."""
        return next((one.hello for one in self._waiting.values()), None)

    def open_job(
        self,
        port: TcpTrainersPort,
        share_refusal: Callable[[Hello], HoldfastError | None] = lambda _: None,
    ) -> None:
        """Serve this job: pass its connections to `port`, and refuse all others. `share_refusal`: returns an error if a
        rank of the job takes this stager for another one.
        """
        self._current, self._share_refusal = port, share_refusal
        waiting, self._waiting = self._waiting, {}
        for one in waiting.values():
            self._unwatch(one.sock)
            self._assign(one.sock, one.hello, one.received)

    def close_job(self) -> None:
        if self._current is not None:
            self._end_current(self._current.generation)

    def stop_accepting(self) -> None:
        """Accept no further job. Ranks of the current job may still reconnect, until `close_job`."""
        self._ending = True
        for one in list(self._waiting.values()):
            self._unwatch(one.sock)
            self._turn_away(one.sock, one.hello)
        self._waiting.clear()

    def close(self) -> None:
        """Close every connection that was not passed to a job."""
        for sock in [self._sock, *self._greetings, *self._waiting]:
            self._reactor.close(sock)

    def _close_overdue(self) -> None:
        """Close connections that take too long to identify themselves."""
        now = self._clock()
        for greeting in list(self._greetings.values()):
            if now <= greeting.deadline:
                break  # the others came later
            self._log_refusal(greeting.peer, "it did not identify itself in time")
            self._discard(greeting)

    # -- handshakes --------------------------------------------------------------------------------------------------

    def _accept(self, _readable: bool, _writable: bool) -> None:
        for _ in range(_ACCEPTED_PER_TURN_MAX):
            try:
                sock, sockaddr = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_DESCRIPTORS and self._greetings:
                    self._discard(next(iter(self._greetings.values())))
                    continue
                _log.debug("a connection is not accepted: %s", error)
                return
            sock.setblocking(False)
            self._start_handshake(sock, f"{sockaddr[0]}:{sockaddr[1]}")
            while len(self._greetings) > _GREETINGS_MAX:
                oldest = next(iter(self._greetings.values()))
                self._log_refusal(oldest.peer, "too many connections have not identified themselves")
                self._discard(oldest)

    def _start_handshake(self, accepted: socket.socket, peer: str) -> None:
        sock: AnySocket = accepted
        if self._tls is not None:
            try:
                sock = self._tls.wrap(accepted)
            except OSError as error:
                _log.debug("%s: %s", peer, error)
                accepted.close()
                return
        deadline = self._clock() + _GREETING_SECONDS_MAX
        greeting = _Greeting(sock, peer, deadline, in_tls_handshake=self._tls is not None)
        self._greetings[sock] = greeting
        self._reactor.watch(sock, functools.partial(self._on_readable, greeting))

    def _on_readable(self, greeting: _Greeting, _readable: bool, _writable: bool) -> None:
        if greeting.in_tls_handshake and not self._continue_tls_handshake(greeting):
            return
        try:
            data = greeting.sock.recv(self._bytes_wanted(greeting))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._discard(greeting)
            return
        greeting.buffer += data
        try:
            if greeting.hello is None:
                self._handle_hello(greeting)
            elif len(greeting.buffer) >= PROOF_MESSAGE_BYTES:
                self._handle_proof(greeting, greeting.hello)
        except VersionMismatch as error:
            self._send_and_close(greeting, rejection(Status.VERSION))
            self._log_refusal(greeting.peer, str(error))
        except (ProtocolError, OSError) as error:
            self._log_refusal(greeting.peer, str(error))
            self._discard(greeting)

    def _continue_tls_handshake(self, greeting: _Greeting) -> bool:
        """Continue the TLS handshake; whether it is done."""
        sock = greeting.sock
        assert isinstance(sock, TlsSocket)
        try:
            buffer = sock.peek_plain(len(HANDSHAKE_RECORD))
            if buffer and is_hello(buffer):
                sock.reject_plain(rejection(Status.TLS), HELLO_BYTES_MAX)
                self._log_refusal(greeting.peer, "it does not speak TLS; give the ranks HOLDFAST_TLS_CA")
                self._discard(greeting)
                return False
            if sock.handshake():
                greeting.in_tls_handshake = False
                return True
        except BlockingIOError:
            pass
        except ssl.SSLError as error:
            self._log_refusal(greeting.peer, f"its TLS handshake failed: {error.reason or error}")
            self._discard(greeting)
        except OSError:
            self._discard(greeting)
        return False

    def _bytes_wanted(self, greeting: _Greeting) -> int:
        if greeting.hello is not None:
            return PROOF_MESSAGE_BYTES - len(greeting.buffer)
        if len(greeting.buffer) < HELLO_BYTES_MIN:
            return HELLO_BYTES_MIN - len(greeting.buffer)
        return HELLO_BYTES_MAX - len(greeting.buffer)

    def _handle_hello(self, greeting: _Greeting) -> None:
        if self._tls is None and greeting.buffer.startswith(HANDSHAKE_RECORD):
            with contextlib.suppress(BlockingIOError):
                # Closing with unread bytes resets the connection, and the rank would not get the answer.
                greeting.sock.recv(_TLS_HELLO_BYTES_MAX)
            self._send_and_close(greeting, NO_TLS_HERE)
            self._log_refusal(
                greeting.peer, "it speaks TLS, and this stager has neither --tls-cert nor --tls-key"
            )
            return
        nbytes = hello_bytes(bytes(greeting.buffer))
        if nbytes is None or len(greeting.buffer) < nbytes:
            return
        if len(greeting.buffer) > nbytes:
            raise ProtocolError("more than a hello came")
        greeting.hello_data = bytes(greeting.buffer)
        greeting.hello = read_hello(greeting.hello_data)
        greeting.nonce = os.urandom(NONCE_BYTES)
        greeting.buffer.clear()
        greeting.sock.send(challenge(self._key, greeting.hello_data, greeting.nonce))

    def _handle_proof(self, greeting: _Greeting, hello: Hello) -> None:
        received = check_proof(self._key, greeting.hello_data, greeting.nonce, bytes(greeting.buffer))
        del self._greetings[greeting.sock]
        self._reactor.unwatch(greeting.sock)
        enable_keepalive(greeting.sock, messages=hello.channel == MESSAGES_CHANNEL)
        if received is None:
            self._log_refusal(greeting.peer, "it has another key")
            refuse(self._reactor, greeting.sock, Status.KEY, "another key")
        else:
            self._assign(greeting.sock, hello, received)

    def _send_and_close(self, greeting: _Greeting, data: bytes) -> None:
        try:
            greeting.sock.send(data)
        except OSError as error:
            _log.debug("%s: %s", greeting.peer, error)
        self._discard(greeting)

    def _discard(self, greeting: _Greeting) -> None:
        self._greetings.pop(greeting.sock, None)
        self._reactor.close(greeting.sock)

    def _log_refusal(self, peer: str, why: str) -> None:
        """Log a refused connection, at most one line in `_REFUSAL_LOG_SECONDS`."""
        self._unlogged_refusals += 1
        now = self._clock()
        if now - self._refusal_logged_at >= _REFUSAL_LOG_SECONDS:
            refusals = self._unlogged_refusals
            more = f"; {refusals} connections since the last such line" if refusals > 1 else ""
            _log.warning("a connection from %s is refused: %s%s", peer, why, more)
            self._refusal_logged_at, self._unlogged_refusals = now, 0

    # -- whose job it is ---------------------------------------------------------------------------------------------

    def _assign(self, sock: AnySocket, hello: Hello, received: int) -> None:
        current = self._current
        ended_job = self._ended_jobs.get(hello.incarnation)
        if self._ending and (current is None or not _belongs_to(hello, current)):
            self._turn_away(sock, hello)
        elif ended_job is not None and hello.generation <= ended_job.generation:
            if ended_job.generation == _ALL_GENERATIONS:
                refuse(
                    self._reactor, sock, Status.REPLACED, "its job is over, or was started again without it"
                )
            else:
                refuse(self._reactor, sock, Status.LOST, _UNKNOWN)
        elif self._expected_ranks not in {None, hello.ranks}:
            text = f"the job has {hello.ranks} ranks, and this stager was started with --ranks {self._expected_ranks}"
            refuse(self._reactor, sock, Status.RANKS, text)
        elif current is not None and _belongs_to(hello, current):
            if hello.ranks != current.ranks:
                text = f"rank {hello.rank} counts {hello.ranks} ranks, another one of its job {current.ranks}"
                refuse(self._reactor, sock, Status.RANKS, text)
            elif current.lead_attempt not in {0, hello.lead_attempt}:
                text = f"attempt {current.lead_attempt} is served here, and the lead has begun another one"
                refuse(self._reactor, sock, Status.LOST, text)
            elif (mismatch := self._share_refusal(hello)) is not None:
                # Two names of one stager: as another connection of this rank it would cut off the first.
                refuse(self._reactor, sock, Status.SHARE, str(mismatch))
            else:
                current.admit(sock, hello, received)
        elif hello.resuming or self._is_superseded(hello):
            refuse(self._reactor, sock, Status.LOST, _UNKNOWN)
            if current is None or current.incarnation != hello.incarnation:
                # A rank of this start that no stager has admitted may connect after the launcher's next start.
                self._record_ended(hello.incarnation, hello.launch, hello.generation)
        elif current is not None and current.is_alive and not self._may_replace(hello, current):
            text = f"this stager serves another job, of {current.ranks} ranks, which is alive"
            refuse(self._reactor, sock, Status.BUSY, text)
        else:
            self._enqueue(sock, hello, received)

    def _turn_away(self, sock: AnySocket, hello: Hello) -> None:
        refuse(self._reactor, sock, Status.ENDING, "the stager is stopping")
        if hello.channel == MESSAGES_CHANNEL:
            self.turned_away.add(hello.rank)

    def _is_superseded(self, hello: Hello) -> bool:
        """Whether a later generation of the same start is served, or waits."""
        known = [one.hello.generation for one in self._waiting.values() if _is_same_start(one.hello, hello)]
        if self._current is not None and self._current.incarnation == hello.incarnation:
            known.append(self._current.generation)
        return any(generation > hello.generation for generation in known)

    def _may_replace(self, hello: Hello, current: TcpTrainersPort) -> bool:
        """Whether `current` must end: its launcher has restarted the job, or its ranks have lost this stager."""
        is_same_start = hello.incarnation == current.incarnation
        return hello.launch == current.launch and (hello.generation == 0 or is_same_start)

    def _enqueue(self, sock: AnySocket, hello: Hello, received: int) -> None:
        if self._current is not None:
            current = self._current
            is_start = hello.generation == 0 and hello.launch == current.launch
            self._end_current(_ALL_GENERATIONS if is_start else current.generation)
            current.drop_all(f"was left behind: {_RESTARTED if is_start else 'ranks of it come again'}")
        if hello.generation == 0:
            # The later of two starts of one launch wins; the first of two launches wins: `_assign` refuses the other.
            for incarnation, ended_job in list(self._ended_jobs.items()):
                if ended_job.launch == hello.launch and incarnation != hello.incarnation:
                    self._ended_jobs[incarnation] = ended_job._replace(generation=_ALL_GENERATIONS)
        for one in list(self._waiting.values()):
            is_same_start = one.hello.incarnation == hello.incarnation
            is_older = one.hello.generation < hello.generation if is_same_start else hello.generation == 0
            if one.hello.launch == hello.launch and is_older:
                self._unwatch(one.sock)
                generation = one.hello.generation if is_same_start else _ALL_GENERATIONS
                self._record_ended(one.hello.incarnation, one.hello.launch, generation)
                status = Status.LOST if is_same_start else Status.REPLACED
                refuse(self._reactor, one.sock, status, "its job was started again without it")
        self._waiting[sock] = _Waiting(sock, hello, received)
        self._watch_disconnect(sock)

    def _watch_disconnect(self, sock: AnySocket) -> None:
        """Drop a waiting rank when its socket becomes readable: it sends nothing, so it has ended."""
        self._reactor.watch(sock, functools.partial(self._on_waiting_disconnect, sock))

    def _on_waiting_disconnect(self, sock: AnySocket, _readable: bool, _writable: bool) -> None:
        del self._waiting[sock]
        self._reactor.close(sock)

    def _unwatch(self, sock: AnySocket) -> None:
        self._waiting.pop(sock, None)
        self._reactor.unwatch(sock)

    def _end_current(self, generation: int) -> None:
        """Record that the current job has ended, up to this generation of its start."""
        assert self._current is not None
        self._record_ended(self._current.incarnation, self._current.launch, generation)
        self._current = None

    def _record_ended(self, incarnation: bytes, launch: str, generation: int) -> None:
        self._ended_jobs[incarnation] = _EndedJob(launch, generation)
        while len(self._ended_jobs) > _ENDED_JOBS_MAX:
            self._ended_jobs.popitem(last=False)


def _is_same_start(hello: Hello, other: Hello) -> bool:
    return hello.incarnation == other.incarnation


def _belongs_to(hello: Hello, port: TcpTrainersPort) -> bool:
    return (hello.incarnation, hello.generation) == (port.incarnation, port.generation)
