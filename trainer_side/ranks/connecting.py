"""Opens a rank's connections to a standalone stager, and proves on each that both have the key."""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import NamedTuple

from holdfast.errors import ConfigError, HoldfastError, PeerLost, ProtocolError
from holdfast.net import handshake
from holdfast.net.address import Address
from holdfast.net.handshake import Hello, JobStart, Status
from holdfast.net.tls import AnySocket, RankTls, enable_keepalive
from holdfast.stager_key import read_stager_key
from trainer_side.ranks.ports import GenerationOver, StartReplaced

_log = logging.getLogger("holdfast.trainer.tcp")

_PAUSE_SECONDS_MIN, _PAUSE_SECONDS_MAX = 0.05, 1.0
_QUIET_SECONDS = 10.0  # a shorter wait is not logged
_BUSY_SECONDS_MAX = 30.0  # the stager notices sooner that the nodes of its last job are gone


class _BusyStager(ConfigError):
    """The stager serves another job, which may end soon."""


class OpenedConnection(NamedTuple):
    """A connection that the stager has admitted."""

    sock: AnySocket
    received: int  # how many messages of this rank the stager has received on this channel


class Connector:
    """Opens connections to one stager. Any thread. ConfigError: the job has more ranks than one stager serves.

    `key` is that of the run; None: that of a stager of this user on this machine (holdfast/stager_key.py). With `tls`
    the stager must speak TLS; otherwise it must not. `lead_attempt`: as in `Hello`.
    """

    def __init__(
        self,
        address: Address,
        key: bytes | None,
        *,
        rank: int,
        ranks: int,
        start: JobStart,
        tls: RankTls | None,
        lead_attempt: int = 0,
    ) -> None:
        if ranks > handshake.RANKS_MAX:
            raise ConfigError(
                f"this job has {ranks} ranks, and a stager that listens serves at most {handshake.RANKS_MAX}; "
                "unset HOLDFAST_STAGER, and start the job with mpirun and a stager in its line"
            )
        self.address, self.rank = address, rank
        self._key, self._ranks, self._start, self._tls = key, ranks, start, tls
        self._lead_attempt = lead_attempt

    def open(
        self, channel: int, *, seconds_max: float, received: int = 0, resuming: bool = False
    ) -> OpenedConnection:
        """Connect and be admitted; retry for `seconds_max`. `channel`: 0 for messages, from 1 on for payloads.
        `received`: how many of the stager's messages this rank has received. `resuming`: this rank was admitted before.

        ConfigError: the stager has another key, another number of ranks, or serves another job; only one side has TLS,
        or the certificate is not trusted. ProtocolError: the peer is no stager, or one of another version.
        GenerationOver, StartReplaced: as the classes say. PeerLost: the stager cannot be reached, or is ending.
        """
        begun = time.monotonic()
        deadline = begun + seconds_max
        pause_seconds, is_logged, why = _PAUSE_SECONDS_MIN, False, ""
        while True:
            try:
                return self._connect_once(channel, received, resuming, deadline)
            except _BusyStager as busy:
                if time.monotonic() - begun > _BUSY_SECONDS_MAX:
                    raise ConfigError(str(busy)) from None
                why = str(busy)
            except OSError as error:
                why = error.strerror or str(error) or type(error).__name__
            now = time.monotonic()
            if now + pause_seconds >= deadline:
                raise PeerLost(
                    f"the stager at {self.address} could not be reached within {seconds_max:g} s: {why}; look whether "
                    "`holdfast stager --listen` runs there, and whether HOLDFAST_STAGER names it"
                )
            if not is_logged and now - begun > _QUIET_SECONDS:
                is_logged = True
                until = time.strftime("%H:%M:%S", time.localtime(time.time() + deadline - now))
                _log.warning("waiting for the stager at %s until %s: %s", self.address, until, why)
            time.sleep(pause_seconds)
            pause_seconds = min(_PAUSE_SECONDS_MAX, pause_seconds * 1.5)

    def _connect_once(self, channel: int, received: int, resuming: bool, deadline: float) -> OpenedConnection:
        sock: AnySocket = socket.create_connection(self.address, timeout=_seconds_left(deadline))
        try:
            if self._tls is not None:
                sock = self._tls.wrap(sock, self.address)
            return self._handshake(sock, channel, received, resuming, deadline)
        except BaseException:
            sock.close()
            raise

    def _handshake(
        self, sock: AnySocket, channel: int, received: int, resuming: bool, deadline: float
    ) -> OpenedConnection:
        enable_keepalive(sock, messages=channel == handshake.MESSAGES_CHANNEL)
        nonce = os.urandom(handshake.NONCE_BYTES)
        hello = Hello(
            self.rank,
            self._ranks,
            channel,
            self._start.launch,
            self._start.incarnation,
            nonce,
            resuming,
            self._start.generation,
            self._lead_attempt,
        )
        data = hello.to_bytes()
        sock.sendall(data)
        key = read_stager_key(self.address) if self._key is None else self._key
        try:
            challenge = _receive_exactly(sock, handshake.CHALLENGE_BYTES, deadline)
            proof = handshake.answer_challenge(key, data, challenge, received)
        except handshake.TlsRequired:
            raise ConfigError(
                f"the stager at {self.address} takes connections with TLS alone, and this rank has no tls_ca; name the "
                "file with the certificate to trust in HOLDFAST_TLS_CA"
            ) from None
        if proof is None:
            raise ConfigError(
                f"the stager at {self.address} has another key than this rank, or only one of them has one; give both "
                "the same in HOLDFAST_KEY or HOLDFAST_KEY_FILE"
            )
        sock.sendall(proof)
        admission = handshake.read_admission(_receive_exactly(sock, handshake.ADMISSION_BYTES, deadline))
        text = _receive_exactly(sock, admission.text_bytes, deadline).decode(errors="replace")
        if admission.status is not Status.ADMITTED:
            raise self._refusal_error(admission.status, text)
        sock.setblocking(False)
        return OpenedConnection(sock, admission.received)

    def _refusal_error(self, status: Status, text: str) -> HoldfastError:
        what = f"the stager at {self.address} refuses rank {self.rank}: {text}"
        match status:
            case Status.BUSY:
                return _BusyStager(
                    f"{what}; end that job, or start a stager for each job, each with an address and a store of its own"
                )
            case Status.RANKS:
                return ConfigError(
                    f"{what}; start as many ranks as the stager expects, or start it without --ranks"
                )
            case Status.SHARE:
                return ConfigError(what)
            case Status.KEY:
                return ConfigError(f"{what}; give both the same in HOLDFAST_KEY or HOLDFAST_KEY_FILE")
            case Status.LOST:
                return GenerationOver(what)
            case Status.REPLACED:
                return StartReplaced(what)
            case Status.ENDING:
                return PeerLost(what)
            case _:
                return ProtocolError(what)


def _seconds_left(deadline: float) -> float:
    left_seconds = deadline - time.monotonic()
    if left_seconds <= 0:
        raise TimeoutError("no answer in time")
    return left_seconds


def _receive_exactly(sock: AnySocket, nbytes: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        sock.settimeout(_seconds_left(deadline))
        part = sock.recv(nbytes - len(data))
        if not part:
            raise ConnectionResetError("the stager has hung up")
        data += part
    return bytes(data)
