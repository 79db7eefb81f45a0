"""Accepts connections for a standing stager, and finds the job that each belongs to.

    accepted ─► handshake, within 10 s ─► of the present job ─────────────────────────► its port
                                       ├─ of the same launch, started again ──────────► the next job; this one ends
                                       ├─ of the same start, a later generation ──────► the next job; this one ends
                                       ├─ of another launch, the present job gone ────► the next job; this one ends
                                       ├─ of another launch, the present job alive ───► refused: BUSY
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

from holdfast.errors import ConfigError, ProtocolError
from holdfast.net.address import Address
from holdfast.net.handshake import (
    GENERATION_MAX,
    HELLO_BYTES_MAX,
    HELLO_BYTES_MIN,
    MESSAGES_CHANNEL,
    NONCE_BYTES,
    PROOF_MESSAGE_BYTES,
    Hello,
    OtherVersion,
    Status,
    challenge,
    check_proof,
    hello_bytes,
    is_hello,
    read_hello,
    refuse_hello,
)
from holdfast.net.lifelines import find_dead_peers
from holdfast.net.tls import HANDSHAKE_RECORD, NO_TLS_HERE, AnySocket, StagerTls, TlsSocket
from stager.reactor import Reactor
from stager.tcp import TcpTrainersPort, refuse

_log = logging.getLogger("holdfast.stager.job_listener")

_BACKLOG = 1024
_ACCEPTED_PER_TURN_MAX = 64
_GREETINGS_MAX = 256  # connections that have not proved the key; beyond this the oldest is closed
_GREETING_SECONDS_MAX = 10.0
_PAST_KEPT = 4096
_FOR_GOOD = GENERATION_MAX + 1
_AGAIN = "its job was started again"
_UNKNOWN = (
    "this stager does not know its job: it was started after it, or the job is over or goes on without it"
)
_TLS_HELLO_BYTES_MAX = 16 * 1024
_COMPLAINT_SECONDS = 10.0  # between two log lines about refused connections
_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@dataclass(slots=True)
class _Greeting:
    """A connection that has not proved the key."""

    sock: AnySocket
    peer: str
    deadline: float
    begun: bytearray = field(default_factory=bytearray)
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


class _Past(NamedTuple):
    """A start of a job that has ended, up to this generation."""

    launch: str
    generation: int


def listen(address: Address) -> socket.socket:
    """Open a listening socket. Raises `ConfigError`: the address is not of this machine, or is in use."""
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, place = found[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        sock.listen(_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"stager setting listen: {address}: {error.strerror or error}; give an address of this machine and a free "
            "port"
        ) from None
    sock.setblocking(False)
    return sock


class JobListener:
    """Assigns connections to the present job or the next one. One thread; no method blocks.

    Args:
        key: Key of the run; empty without a key.
        ranks: How many ranks a job must have; None accepts the number that its first rank states.
        tls: Ranks must speak TLS; None: they must not.

    Attributes:
        turned_away: Ranks that have connected since `end`, and were told that the stager is stopping.
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
        self._key, self._wanted_ranks, self._tls = key, ranks, tls
        self._greetings: OrderedDict[AnySocket, _Greeting] = OrderedDict()
        self._waiting: dict[AnySocket, _Waiting] = {}
        self._past: OrderedDict[bytes, _Past] = OrderedDict()  # by incarnation
        self._present: TcpTrainersPort | None = None
        self._ending = False
        self.turned_away: set[int] = set()
        self._complained_at = -_COMPLAINT_SECONDS
        self._complaints = 0
        reactor.watch(sock, self._accept)
        reactor.each_turn(self._end_the_late)  # while a job is served, too

    # -- jobs --------------------------------------------------------------------------------------------------------

    def next_job(self) -> Hello | None:
        """The HELLO of the next job's first rank; None until one has connected."""
        return next((one.hello for one in self._waiting.values()), None)

    def open(self, port: TcpTrainersPort) -> None:
        """Serve this job: pass its connections to `port`, and refuse all others."""
        self._present = port
        waiting, self._waiting = self._waiting, {}
        for one in waiting.values():
            self._unwatch(one.sock)
            self._place(one.sock, one.hello, one.received)

    def close_job(self) -> None:
        if self._present is not None:
            self._end_present(self._present.generation)

    def end(self) -> None:
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

    def _end_the_late(self) -> None:
        """Close connections that take too long to identify themselves."""
        now = self._clock()
        for greeting in list(self._greetings.values()):
            if now <= greeting.deadline:
                break  # the others came later
            self._complain(greeting.peer, "it did not identify itself in time")
            self._forget(greeting)

    # -- handshakes --------------------------------------------------------------------------------------------------

    def _accept(self, _readable: bool, _writable: bool) -> None:
        for _ in range(_ACCEPTED_PER_TURN_MAX):
            try:
                sock, place = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_DESCRIPTORS and self._greetings:
                    self._forget(next(iter(self._greetings.values())))
                    continue
                _log.debug("a connection is not accepted: %s", error)
                return
            sock.setblocking(False)
            self._greet(sock, f"{place[0]}:{place[1]}")
            while len(self._greetings) > _GREETINGS_MAX:
                oldest = next(iter(self._greetings.values()))
                self._complain(oldest.peer, "too many connections have not identified themselves")
                self._forget(oldest)

    def _greet(self, accepted: socket.socket, peer: str) -> None:
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
        self._reactor.watch(sock, functools.partial(self._hear, greeting))

    def _hear(self, greeting: _Greeting, _readable: bool, _writable: bool) -> None:
        if greeting.in_tls_handshake and not self._has_shaken_hands(greeting):
            return
        try:
            data = greeting.sock.recv(self._bytes_wanted(greeting))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._forget(greeting)
            return
        greeting.begun += data
        try:
            if greeting.hello is None:
                self._hear_hello(greeting)
            elif len(greeting.begun) >= PROOF_MESSAGE_BYTES:
                self._hear_proof(greeting, greeting.hello)
        except OtherVersion as error:
            self._send_last(greeting, refuse_hello(Status.VERSION))
            self._complain(greeting.peer, str(error))
        except (ProtocolError, OSError) as error:
            self._complain(greeting.peer, str(error))
            self._forget(greeting)

    def _has_shaken_hands(self, greeting: _Greeting) -> bool:
        """Continue the TLS handshake; whether it is done."""
        sock = greeting.sock
        assert isinstance(sock, TlsSocket)
        try:
            begun = sock.first_bytes(len(HANDSHAKE_RECORD))
            if begun and is_hello(begun):
                sock.refuse_plain(refuse_hello(Status.TLS), HELLO_BYTES_MAX)
                self._complain(greeting.peer, "it does not speak TLS; give the ranks HOLDFAST_TLS_CA")
                self._forget(greeting)
                return False
            if sock.handshake():
                greeting.in_tls_handshake = False
                return True
        except BlockingIOError:
            pass
        except ssl.SSLError as error:
            self._complain(greeting.peer, f"its TLS handshake failed: {error.reason or error}")
            self._forget(greeting)
        except OSError:
            self._forget(greeting)
        return False

    def _bytes_wanted(self, greeting: _Greeting) -> int:
        if greeting.hello is not None:
            return PROOF_MESSAGE_BYTES - len(greeting.begun)
        if len(greeting.begun) < HELLO_BYTES_MIN:
            return HELLO_BYTES_MIN - len(greeting.begun)
        return HELLO_BYTES_MAX - len(greeting.begun)

    def _hear_hello(self, greeting: _Greeting) -> None:
        if self._tls is None and greeting.begun.startswith(HANDSHAKE_RECORD):
            with contextlib.suppress(BlockingIOError):
                # Closing with unread bytes resets the connection, and the rank would not get the answer.
                greeting.sock.recv(_TLS_HELLO_BYTES_MAX)
            self._send_last(greeting, NO_TLS_HERE)
            self._complain(
                greeting.peer, "it speaks TLS, and this stager has neither --tls-cert nor --tls-key"
            )
            return
        nbytes = hello_bytes(bytes(greeting.begun))
        if nbytes is None or len(greeting.begun) < nbytes:
            return
        if len(greeting.begun) > nbytes:
            raise ProtocolError("more than a hello came")
        greeting.hello_data = bytes(greeting.begun)
        greeting.hello = read_hello(greeting.hello_data)
        greeting.nonce = os.urandom(NONCE_BYTES)
        greeting.begun.clear()
        greeting.sock.send(challenge(self._key, greeting.hello_data, greeting.nonce))

    def _hear_proof(self, greeting: _Greeting, hello: Hello) -> None:
        received = check_proof(self._key, greeting.hello_data, greeting.nonce, bytes(greeting.begun))
        del self._greetings[greeting.sock]
        self._reactor.unwatch(greeting.sock)
        find_dead_peers(greeting.sock, messages=hello.channel == MESSAGES_CHANNEL)
        if received is None:
            self._complain(greeting.peer, "it has another key")
            refuse(self._reactor, greeting.sock, Status.KEY, "another key")
        else:
            self._place(greeting.sock, hello, received)

    def _send_last(self, greeting: _Greeting, data: bytes) -> None:
        try:
            greeting.sock.send(data)
        except OSError as error:
            _log.debug("%s: %s", greeting.peer, error)
        self._forget(greeting)

    def _forget(self, greeting: _Greeting) -> None:
        self._greetings.pop(greeting.sock, None)
        self._reactor.close(greeting.sock)

    def _complain(self, peer: str, why: str) -> None:
        """Log a refused connection, at most one line in `_COMPLAINT_SECONDS`."""
        self._complaints += 1
        now = self._clock()
        if now - self._complained_at >= _COMPLAINT_SECONDS:
            more = (
                f"; {self._complaints} connections since the last such line" if self._complaints > 1 else ""
            )
            _log.warning("a connection from %s is refused: %s%s", peer, why, more)
            self._complained_at, self._complaints = now, 0

    # -- whose job it is ---------------------------------------------------------------------------------------------

    def _place(self, sock: AnySocket, hello: Hello, received: int) -> None:
        present = self._present
        past = self._past.get(hello.incarnation)
        if self._ending and (present is None or not _is_of(hello, present)):
            self._turn_away(sock, hello)
        elif past is not None and hello.generation <= past.generation:
            if past.generation == _FOR_GOOD:
                refuse(
                    self._reactor, sock, Status.REPLACED, "its job is over, or was started again without it"
                )
            else:
                refuse(self._reactor, sock, Status.LOST, _UNKNOWN)
        elif self._wanted_ranks not in {None, hello.ranks}:
            text = f"the job has {hello.ranks} ranks, and this stager was started with --ranks {self._wanted_ranks}"
            refuse(self._reactor, sock, Status.RANKS, text)
        elif present is not None and _is_of(hello, present):
            if hello.ranks != present.ranks:
                text = f"rank {hello.rank} counts {hello.ranks} ranks, another one of its job {present.ranks}"
                refuse(self._reactor, sock, Status.RANKS, text)
            elif present.lead_attempt not in {0, hello.lead_attempt}:
                text = f"attempt {present.lead_attempt} is served here, and the lead has begun another one"
                refuse(self._reactor, sock, Status.LOST, text)
            else:
                present.admit(sock, hello, received)
        elif hello.resuming or self._is_behind(hello):
            refuse(self._reactor, sock, Status.LOST, _UNKNOWN)
            if present is None or present.incarnation != hello.incarnation:
                # A rank of this start that no stager has admitted may connect after the launcher's next start.
                self._note_past(hello.incarnation, hello.launch, hello.generation)
        elif present is not None and present.is_alive and not self._may_replace(hello, present):
            text = f"this stager serves another job, of {present.ranks} ranks, which is alive"
            refuse(self._reactor, sock, Status.BUSY, text)
        else:
            self._wait(sock, hello, received)

    def _turn_away(self, sock: AnySocket, hello: Hello) -> None:
        refuse(self._reactor, sock, Status.ENDING, "the stager is stopping")
        if hello.channel == MESSAGES_CHANNEL:
            self.turned_away.add(hello.rank)

    def _is_behind(self, hello: Hello) -> bool:
        """Whether a later generation of the same start is served, or waits."""
        known = [one.hello.generation for one in self._waiting.values() if _same_start(one.hello, hello)]
        if self._present is not None and self._present.incarnation == hello.incarnation:
            known.append(self._present.generation)
        return any(generation > hello.generation for generation in known)

    def _may_replace(self, hello: Hello, present: TcpTrainersPort) -> bool:
        """Whether `present` must end: its launcher has restarted the job, or its ranks have lost this stager."""
        is_same_start = hello.incarnation == present.incarnation
        return hello.launch == present.launch and (hello.generation == 0 or is_same_start)

    def _wait(self, sock: AnySocket, hello: Hello, received: int) -> None:
        if self._present is not None:
            present = self._present
            is_start = hello.generation == 0 and hello.launch == present.launch
            self._end_present(_FOR_GOOD if is_start else present.generation)
            present.end(f"was left behind: {_AGAIN if is_start else 'ranks of it come again'}")
        if hello.generation == 0:
            # The later of two starts of one launch wins; the first of two launches wins: `open` refuses the other.
            for incarnation, past in list(self._past.items()):
                if past.launch == hello.launch and incarnation != hello.incarnation:
                    self._past[incarnation] = past._replace(generation=_FOR_GOOD)
        for one in list(self._waiting.values()):
            is_same_start = one.hello.incarnation == hello.incarnation
            is_older = one.hello.generation < hello.generation if is_same_start else hello.generation == 0
            if one.hello.launch == hello.launch and is_older:
                self._unwatch(one.sock)
                generation = one.hello.generation if is_same_start else _FOR_GOOD
                self._note_past(one.hello.incarnation, one.hello.launch, generation)
                status = Status.LOST if is_same_start else Status.REPLACED
                refuse(self._reactor, one.sock, status, "its job was started again without it")
        self._waiting[sock] = _Waiting(sock, hello, received)
        self._watch_end(sock)

    def _watch_end(self, sock: AnySocket) -> None:
        """Drop a waiting rank when its socket becomes readable: it sends nothing, so it has ended."""
        self._reactor.watch(sock, functools.partial(self._waiting_ended, sock))

    def _waiting_ended(self, sock: AnySocket, _readable: bool, _writable: bool) -> None:
        del self._waiting[sock]
        self._reactor.close(sock)

    def _unwatch(self, sock: AnySocket) -> None:
        self._waiting.pop(sock, None)
        self._reactor.unwatch(sock)

    def _end_present(self, generation: int) -> None:
        """Record that the present job has ended, up to this generation of its start."""
        assert self._present is not None
        self._note_past(self._present.incarnation, self._present.launch, generation)
        self._present = None

    def _note_past(self, incarnation: bytes, launch: str, generation: int) -> None:
        self._past[incarnation] = _Past(launch, generation)
        while len(self._past) > _PAST_KEPT:
            self._past.popitem(last=False)


def _same_start(hello: Hello, other: Hello) -> bool:
    return hello.incarnation == other.incarnation


def _is_of(hello: Hello, port: TcpTrainersPort) -> bool:
    return (hello.incarnation, hello.generation) == (port.incarnation, port.generation)
