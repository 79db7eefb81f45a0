"""The sockets between ranks and a stager: keepalive, and TLS 1.3 if both are configured for it.

The key handshake runs inside TLS.

    rank: trusts certificates in `tls_ca` ──► TLS ◄── stager: shows `tls_cert`, which is for the host in HOLDFAST_STAGER

A TLS socket buffers decrypted bytes, which epoll and poll do not report: ask `pending`.
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError
from holdfast.net.address import Address

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

_log = logging.getLogger("holdfast.tls")

HANDSHAKE_RECORD = b"\x16\x03"  # the first bytes of a connection with TLS
# A fatal alert, no_application_protocol: a stager without TLS sends it to a TLS client; a stager with TLS never does.
NO_TLS_HERE = b"\x15\x03\x03\x00\x02\x02\x78"
_NO_TLS_THERE = "no application protocol"  # OpenSSL's text of that alert; not every Python has a constant
_BYTES_PER_READ_MAX = 1 << 20
_BYTES_PER_WRITE_MAX = 256 * 1024  # OpenSSL does not report a partial write
_WAITS = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
_IDLE_SECONDS, _EVERY_SECONDS, _PROBES = 5, 2, 3
_UNANSWERED_SECONDS_MAX = 10.0  # for the other machine to answer a keepalive


class TlsSocket(ssl.SSLSocket):
    """A TCP connection with TLS, for code that expects a plain one: it raises `BlockingIOError`, and knows the calls
    with several buffers. `close` does no TLS shutdown: counts tell both sides which bytes were received.
    """

    def handshake(self) -> bool:
        """Continue the TLS handshake; return whether it is done. Raises `OSError`: the peer refuses, or has no TLS."""
        try:
            self.do_handshake()
        except _WAITS:
            return False
        return True

    def peek_plain(self, nbytes: int) -> bytes:
        """Peek at the raw bytes before the TLS handshake; they stay in the socket."""
        return socket.socket.recv(self, nbytes, socket.MSG_PEEK)

    def reject_plain(self, data: bytes, nbytes: int) -> None:
        """Read up to `nbytes` and send `data`, both without TLS, for a peer that does not speak it."""
        socket.socket.recv(self, nbytes)
        socket.socket.send(self, data)

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        try:
            return super().recv(buflen, flags)
        except _WAITS:
            raise BlockingIOError from None

    def recv_into(self, buffer: WriteableBuffer, nbytes: int | None = None, flags: int = 0) -> int:
        try:
            return super().recv_into(buffer, nbytes, flags)
        except _WAITS:
            raise BlockingIOError from None

    def recvmsg_into(self, buffers: Sequence[memoryview]) -> tuple[int, list[Any], int, Any]:  # type: ignore[override]
        """As `socket.recvmsg_into`; calls OpenSSL many times, which returns at most 16 KiB per call."""
        total = 0
        for buffer in buffers:
            filled = 0
            while filled < len(buffer):
                if total >= _BYTES_PER_READ_MAX:
                    return total, [], 0, None
                try:
                    nbytes = self.recv_into(buffer[filled:])
                except BlockingIOError:
                    if total == 0:
                        raise
                    return total, [], 0, None
                if nbytes == 0:
                    return total, [], 0, None
                filled += nbytes
                total += nbytes
        return total, [], 0, None

    def send(self, data: ReadableBuffer, flags: int = 0) -> int:
        """As `socket.send`. After a `BlockingIOError` the next call must begin with the same bytes."""
        try:
            return super().send(memoryview(data)[:_BYTES_PER_WRITE_MAX], flags)
        except _WAITS:
            raise BlockingIOError from None

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:  # type: ignore[override]
        return self.send(buffers[0])


AnySocket = socket.socket  # with TLS or without


def enable_keepalive(sock: socket.socket, *, messages: bool) -> None:
    """Have the kernel end the connection if the other machine does not answer for about ten seconds. A stopped process
    does not count: its kernel answers. `messages`: also limit unacknowledged data; not for payloads, which may wait at
    the closed window of a stopped process.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _EVERY_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    if messages:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_UNANSWERED_SECONDS_MAX * 1000))


def _make_context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.sslsocket_class = TlsSocket
    return context


class StagerTls:
    """The stager's side of TLS; reloads a renewed certificate without a restart. `cert`: file with the certificate, and
    those up to the authority that ranks trust. Raises `ConfigError`: files are unreadable, or do not match.
    """

    def __init__(self, cert: Path, key: Path) -> None:
        self._cert, self._key = cert, key
        self._context = self._load()
        self._loaded_mtimes = self._mtimes()

    def wrap(self, sock: socket.socket) -> TlsSocket:
        """Wrap an accepted, non-blocking connection before its TLS handshake. Raises `OSError`: it has ended."""
        self._reload_if_changed()
        wrapped = self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        assert isinstance(wrapped, TlsSocket)
        return wrapped

    def _reload_if_changed(self) -> None:
        mtimes = self._mtimes()
        if mtimes == self._loaded_mtimes:
            return
        self._loaded_mtimes = mtimes
        try:
            self._context = self._load()
        except ConfigError as error:  # perhaps only one of the two files was replaced so far
            _log.warning("the certificate has changed, and the one before is still used: %s", error)
        else:
            _log.info("the certificate in %s has changed, and is used from now on", self._cert)

    def _mtimes(self) -> tuple[int, ...]:
        try:
            return tuple(path.stat().st_mtime_ns for path in (self._cert, self._key))
        except OSError:
            return ()

    def _load(self) -> ssl.SSLContext:
        context = _make_context(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self._cert, self._key, password=_no_password)
        except ssl.SSLError as error:
            raise ConfigError(
                f"stager settings tls_cert and tls_key: {self._cert}, {self._key}: {error.reason or error}; expected a "
                "certificate and its private key as PEM, without a password"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"stager settings tls_cert and tls_key: {self._cert}, {self._key}: {error.strerror or error}; expected "
                "two files that this user may read"
            ) from None
        return context


def _no_password() -> str:
    raise OSError("the private key has a password")  # otherwise OpenSSL would prompt on the terminal


class RankTls:
    """A rank's side of TLS. Any thread. `ca`: file with the trusted certificates. Raises `ConfigError`: unreadable."""

    def __init__(self, ca: Path) -> None:
        self._ca, self._context = ca, _make_context(ssl.PROTOCOL_TLS_CLIENT)
        try:
            self._context.load_verify_locations(cafile=ca)
        except ssl.SSLError as error:
            raise ConfigError(
                f"trainer setting tls_ca: {ca}: {error.reason or error}; expected certificates as PEM"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"trainer setting tls_ca: {ca}: {error.strerror or error}; expected a file with the certificate of the "
                "stager, or of the authority that has signed it"
            ) from None

    def wrap(self, sock: socket.socket, address: Address) -> socket.socket:
        """Wrap a connection, with the TLS handshake. Raises `ConfigError`: not trusted, or no TLS; `OSError`: ended."""
        try:
            return self._context.wrap_socket(sock, server_hostname=address.host)
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(
                f"the certificate of the stager at {address} is not accepted: {error.verify_message.rstrip('.')}; "
                f"{_advice(error.verify_code, self._ca)}"
            ) from None
        except ssl.SSLError as error:
            if _NO_TLS_THERE in str(error).replace("_", " ").lower():
                raise ConfigError(
                    f"the stager at {address} does not speak TLS, and this rank has tls_ca = {self._ca}; start the "
                    "stager with --tls-cert and --tls-key, or unset HOLDFAST_TLS_CA"
                ) from None
            raise


_EXPIRED, _NOT_YET_VALID = 10, 9  # X509_V_ERR_CERT_HAS_EXPIRED, X509_V_ERR_CERT_NOT_YET_VALID
_OTHER_NAME, _OTHER_IP = 62, 64  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH


def _advice(code: int, ca: Path) -> str:
    if code == _EXPIRED:
        return "write a new one into the stager's file --tls-cert, which needs no restart of the stager"
    if code == _NOT_YET_VALID:
        return "set the clock of this machine, or of the one that has made it"
    if code in {_OTHER_NAME, _OTHER_IP}:
        return "give HOLDFAST_STAGER the name that the certificate is for, or make one for this name (subjectAltName)"
    return f"HOLDFAST_TLS_CA must name the certificate of the authority that has signed it, and names {ca}"
