"""A standalone stager: it listens, serves one job after the other, and keeps the ring between them.

    listening ── first rank of a job ─► serving ── all ranks have left or are lost ─► listening
        └── told to stop ─► no further job or step; what is staged is written ─► ended ◄──┘

A restarted job restores from the ring that its last start has left. The stager ends when no job comes for
`idle_seconds_max`; one that a job has started also ends with that job (own.py). SIGTERM, SIGINT and a terminal that
closes (SIGHUP, which `nohup` ignores) tell the stager to stop. Ranks that continue to train are told at each later
step that the stager is stopping, and again when they reconnect after it has ended their connection.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import signal
import socket
import time
from dataclasses import replace
from types import FrameType

from holdfast.config import StagerConfig
from holdfast.errors import ConfigError, HoldfastError, PeerLost
from holdfast.image.shares import ShareNumber
from holdfast.net.address import Address, parse_address
from holdfast.net.handshake import Hello
from holdfast.net.key import read_key
from holdfast.net.tls import StagerTls
from holdfast.process import ENDING_SIGNALS, wait_readable
from holdfast.ring.directory import runtime_directory
from holdfast.ring.ring_keeper import RingKeeper
from holdfast.stager_key import StagerKey
from holdfast.store import normalise_url
from holdfast.telemetry.event_text import truncate
from holdfast.telemetry.status_document import TEXT_CHARACTERS_MAX, StatusDocument
from holdfast.telemetry.status_socket import serve_status
from stager.flusher_process import Flusher, attach, reap
from stager.job_listener import JobListener, listen
from stager.reactor import Reactor
from stager.service import StartRefused, serve
from stager.tcp import TcpTrainersPort

_log = logging.getLogger("holdfast.stager")

_TICK_SECONDS = 1.0
_SIGNALS_MAX = 64
_GOODBYE_SECONDS_MAX = 5.0  # a rank whose connection ends reconnects at once
_ANY_ADDRESS = frozenset({"0.0.0.0", "::"})  # noqa: S104 - no address to connect to


def key_of(config: StagerConfig) -> bytes:
    """Return the key that ranks must prove to have; empty: the stager makes one for ranks on this machine. Raises
    `ConfigError`: no key is set, and other machines can reach the address.
    """
    key = read_key(None if config.key is None else config.key.get_secret_value(), config.key_file)
    address = parse_address(config.listen or "")
    if not key and not address.is_loopback:
        raise ConfigError(
            f"stager setting listen: {address} may be reached from other machines, and there is no key: whoever "
            "reaches it could read and replace checkpoints; make a key with `holdfast stager --new-key`, and give the "
            "same one to stager and ranks in HOLDFAST_KEY or HOLDFAST_KEY_FILE; or listen to 127.0.0.1 alone: then the "
            "stager makes a key, which ranks of the same user find"
        )
    return key


def tls_of(config: StagerConfig) -> StagerTls | None:
    """Return the stager's side of TLS; None without TLS. Raises `ConfigError`: only one of certificate and private key
    is set, or they are unusable.
    """
    if config.tls_cert is None and config.tls_key is None:
        return None
    if config.tls_cert is None or config.tls_key is None:
        raise ConfigError(
            "stager settings tls_cert and tls_key: only one of them is set; give the certificate with --tls-cert and "
            "its private key with --tls-key"
        )
    return StagerTls(config.tls_cert, config.tls_key)


def _share_mismatch(share: ShareNumber, hello: Hello) -> ConfigError | None:
    """Return an error if ranks with this `hello` have mistaken this stager for another one of their list."""
    is_return = share.is_lead and hello.generation > 0  # it was in place when they first met it
    if is_return or share.is_lead == (hello.lead_attempt == 0):
        return None
    taken_for = "the first stager" if hello.lead_attempt == 0 else "one after the first"
    return ConfigError(
        f"the ranks take the stager with share {share} for {taken_for}; name the stagers in HOLDFAST_STAGER in the "
        "order of their shares, 1/S first, and each once"
    )


class StandingStager:
    """Serves jobs one after the other, over TCP. Main thread.

    Attributes:
        address: The listening address, with the real port even if the setting was port 0.

    Raises:
        ConfigError: The address cannot be used, a required key is missing, or the certificate is unusable.
        StoreError: The store refuses the flusher.
    """

    def __init__(self, config: StagerConfig) -> None:
        self._config = config
        key, tls = key_of(config), tls_of(config)
        address = parse_address(config.listen or "")
        sock = listen(address)
        self.address = Address(address.host, int(sock.getsockname()[1]))
        # Before the first connection is answered: ranks then look for the key.
        self._own_key = None if key else StagerKey(self.address)
        if self._own_key is not None:
            key = self._own_key.key
        self._directory = runtime_directory(config.store, config.runtime_dir, share=config.share.index)
        self._keeper: RingKeeper | None = RingKeeper(self._directory)
        self._reactor = Reactor()
        self._listener = JobListener(sock, self._reactor, key, ranks=config.ranks, tls=tls)
        self._is_stopping = False
        self._lost: set[int] = set()  # ranks of the last job
        self._abandoned_ranks: list[int] = []  # ranks that had not left when this stager was told to stop
        # A signal wakes the loop, which stops between two turns.
        self._wakeup_send, self._wakeup_receive = socket.socketpair()
        for end in (self._wakeup_send, self._wakeup_receive):
            end.setblocking(False)
        self._reactor.watch(self._wakeup_receive, self._on_wakeup)
        self._attached = self._attach_early()
        signal.set_wakeup_fd(self._wakeup_send.fileno())
        for number in ENDING_SIGNALS:
            signal.signal(number, self._on_signal)

    def _attach_early(self) -> Flusher | None:
        # Now, not at the first job, so that the operator sees an error of the store at once. With several stagers, the
        # ranks know the attempt: that of the lead, or the one that this stager's last process had.
        share = self._config.share
        may_continue = share.writers > 1 and (self._directory / "journal").exists()
        return attach(self._config) if share.is_lead and not may_continue else None

    @property
    def rank_command(self) -> str:
        host = socket.gethostname() if self.address.host in _ANY_ADDRESS else self.address.host
        key = ""
        if self._config.key_file is not None:
            key = f" HOLDFAST_KEY_FILE={self._config.key_file}"
        elif self._config.key is not None:
            key = " HOLDFAST_KEY=..."
        if self._config.tls_cert is not None:
            key += " HOLDFAST_TLS_CA=..."
        per_node, share = self._config.ranks or "N", self._config.share
        stagers = [f"STAGER-{number}:PORT" for number in range(1, share.writers + 1)]
        stagers[share.index] = str(self.address._replace(host=host))
        return f"HOLDFAST_STAGER={','.join(stagers)}{key} torchrun --nproc-per-node {per_node} train.py"

    def run(self, *, jobs: int | None = None) -> None:
        """Serve until a signal stops the stager, or it is idle for too long. `jobs`: end after this number of jobs.

        Raises:
            PeerLost: The stager was told to stop before all ranks of a job had left; staged checkpoints are written.
            HoldfastError: Staged checkpoints of the last job could not be written.
        """
        served = 0
        try:
            while not self._is_stopping and (jobs is None or served < jobs) and self._wait_for_job():
                self._serve_next()
                served += 1
                if self._ends_with_job():
                    break
        finally:
            self._listener.stop_accepting()
            self._listener.close()
            if self._attached is not None:
                self._attached.close()
            if self._keeper is not None:
                self._keeper.close()
            if self._own_key is not None:
                self._own_key.close()
        if self._abandoned_ranks:
            raise PeerLost(
                f"the stager was told to stop before its job had ended: ranks {self._abandoned_ranks} are left alone. "
                "Staged checkpoints are written; start the stager and the job again"
            )

    def _ends_with_job(self) -> bool:
        return False

    def _wait_for_job(self) -> bool:
        """Wait for a job; False if the stager was told to stop, or no job came within `idle_seconds_max`."""
        deadline = time.monotonic() + (self._config.idle_seconds_max or math.inf)
        directory = self._directory
        waiting = functools.partial(self._status_document, time.time())
        # Between jobs: while a job is served, `serve` publishes a status document of its own.
        with serve_status(directory, "stager", waiting) if directory.is_dir() else contextlib.nullcontext():
            while not self._is_stopping and time.monotonic() < deadline:
                reap()
                if self._listener.next_job() is not None:
                    return True
                wait_readable([self._reactor.fileno()], _TICK_SECONDS)
                self._reactor.run_once()
        return False

    def _status_document(self, since_unix: float) -> StatusDocument:
        return StatusDocument(
            role="stager",
            run=truncate(normalise_url(self._config.store), 4 * TEXT_CHARACTERS_MAX),
            pid=os.getpid(),
            since_unix=since_unix,
            now_unix=time.time(),
            waits_at=str(self.address),
        )

    def _serve_next(self) -> None:
        hello = self._listener.next_job()
        assert hello is not None
        port = TcpTrainersPort(
            self._reactor,
            # If the ranks name different attempts, the lead asks to continue the one that the first rank names.
            replace(hello, lead_attempt=0) if self._config.share.is_lead else hello,
            reconnect_seconds_max=self._config.reconnect_seconds_max,
            start_seconds_max=self._config.start_seconds_max,
        )
        _log.info("a job of %d ranks joins (%s)", hello.ranks, hello.launch)
        begun = time.monotonic()
        self._lost = set()
        mismatch = _share_mismatch(self._config.share, hello)
        if mismatch is None:
            self._listener.open_job(port, functools.partial(_share_mismatch, self._config.share))
        else:  # `serve` admits the ranks, and tells them
            self._listener.open_job(port)
        try:
            attached, self._attached = self._attached, None
            self._lost = lost = serve(
                port,
                self._config,
                mismatch,
                attached=attached,
                is_stopping=lambda: self._is_stopping,
                lead_attempt=hello.lead_attempt,
            )
            if self._is_stopping:
                self._abandoned_ranks = sorted(lost)
            _log.info(
                "the job has ended after %.0f s%s; the next one may join",
                time.monotonic() - begun,
                f", with ranks {sorted(lost)} lost" if lost else "",
            )
        except StartRefused as refused:
            _log.error("the job was refused: %s", refused.error)
        except HoldfastError as error:
            if self._is_stopping:
                raise
            _log.error("the job has ended, and not all of its checkpoints are in the store: %s", error)
        finally:
            self._listener.close_job()
            connected = port.connected
            port.close()
            if self._is_stopping:
                self._turn_away_reconnecting(connected)

    def _turn_away_reconnecting(self, ranks: set[int]) -> None:
        """Tell reconnecting ranks that this stager is stopping: otherwise they would wait for it."""
        deadline = time.monotonic() + _GOODBYE_SECONDS_MAX
        while not ranks <= self._listener.turned_away and time.monotonic() < deadline:
            wait_readable([self._reactor.fileno()], _TICK_SECONDS)
            self._reactor.run_once()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # A second signal ends the process at once. SIGHUP does not: the kernel and the shell may both send it.
        if self._is_stopping and number != signal.SIGHUP:
            raise SystemExit(128 + number)
        self._is_stopping = True

    def _on_wakeup(self, _readable: bool, _writable: bool) -> None:
        self._wakeup_receive.recv(_SIGNALS_MAX)
        if not self._is_stopping:
            return  # another signal woke the loop
        _log.warning("stopping: no further job is taken, and what is staged is written to the store")
        self._listener.stop_accepting()
        if self._keeper is not None:  # no later job will use this ring
            self._keeper.close()
            self._keeper = None
