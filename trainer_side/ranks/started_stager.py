"""The job's own stager: rank 0 starts it or finds a living one, and every rank connects to it.

    rank 0 ─► a living one of this run on this machine, else `holdfast stager --own` ─► address, key ─► all ranks
                  ▲                                            │ a session of its own, and a log of its own
                  └── the job is started again                 └─ dies: restarted at the same address; ranks reconnect

The own stager outlives the ranks, and ends by itself (stager/own.py). If a rank cannot reach it at the start, all ranks
end. With `stager="own-per-node"` the first rank of each node does what rank 0 does here, for a stager with a share.
With `on_stager_lost="own"` the own stager replaces the one that `stager` names once that is lost. The claim on the run
prevents two writers: while the lost stager's flusher lives, the own stager refuses, and rank 0 retries the named one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, NamedTuple

from holdfast.config import OWN_PER_NODE, OWN_STAGER, StagerConfig, TrainerConfig
from holdfast.errors import ConfigError, HoldfastError, PeerLost
from holdfast.image.shares import WHOLE, ShareNumber
from holdfast.log_files import last_lines, log_path
from holdfast.net.address import Address, parse_address
from holdfast.net.handshake import JobStart
from holdfast.net.key import new_key, read_key
from holdfast.own_stager import OwnStagerEndpoint, find_own_stager, parse_first_line
from holdfast.supervised import ATTEMPT_VARIABLE, KEPT_VARIABLE
from trainer_side.ranks.deadlines import within
from trainer_side.ranks.peers import Peers, raise_agreed
from trainer_side.ranks.tcp_stager_port import StagerTarget, TcpStagerPort, connect_to_stager

if TYPE_CHECKING:
    from trainer_side.ranks.c10d_store import StoreAnnouncements

_log = logging.getLogger("holdfast.trainer")

_ANY = "0.0.0.0"  # noqa: S104 - only peers with the key are served
_ANY_ADDRESS = frozenset({_ANY, "::"})
_LOOPBACK = "127.0.0.1"
_PROBE_ADDRESS = ("192.0.2.1", 9)  # in a documentation network (RFC 5737); no packet is sent
_LINE_BYTES_MAX = 1 << 16
_POLL_SECONDS = 0.2  # while a stager of an earlier start ends
# A launcher's variables would make it a rank; those of `holdfast run` are about another stager.
_HIDDEN_VARIABLES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", ATTEMPT_VARIABLE, KEPT_VARIABLE, "HOLDFAST_KEY_FILE")


class OwnShare(NamedTuple):
    """One of the stagers that a job starts for itself."""

    root: int = 0  # the rank that starts it on its machine
    share: ShareNumber = WHOLE  # of each checkpoint
    lead_attempt: int = 0  # as `Hello.lead_attempt`


_ONLY_SHARE = OwnShare()


def living_share(config: TrainerConfig) -> str:
    """Return the share, as K/S, of the own stager that an earlier start has left on this machine; empty if none."""
    with contextlib.suppress(HoldfastError):  # `StagerStarter` raises the same error, on all ranks
        if config.store is not None:
            stager = StagerConfig.from_sources(store=config.store)
            found = find_own_stager(config.store, stager.runtime_dir)
            return "" if found is None else found.share
    return ""


def starting_ranks(nodes: Sequence[int], living: Sequence[str]) -> list[int]:
    """Return the rank that starts the stager of each share. A living stager keeps its share, because its ring has this
    share of the newest checkpoints. `nodes`: The first rank of each node. `living`: Of each, its `living_share`.
    """
    texts = [str(ShareNumber(index, len(nodes))) for index in range(len(nodes))]
    by_share = dict(zip(living, nodes, strict=True))
    rest = iter([rank for rank in nodes if rank not in {by_share.get(text) for text in texts}])
    return [by_share[text] if text in by_share else next(rest) for text in texts]


class StagerStarter:
    """Handle of an own stager, on the rank that starts it: finds or starts the stager. One thread at a time. It listens
    on loopback if all ranks are on `one_machine`.

    ConfigError: a setting of the stager is wrong, or other machines could not reach its address.
    """

    def __init__(self, config: TrainerConfig, *, one_machine: bool, own: OwnShare = _ONLY_SHARE) -> None:
        rank = self._rank = f"rank {own.root}"
        if config.store is None:
            setting = OWN_PER_NODE if config.stager == OWN_PER_NODE else OWN_STAGER
            raise ConfigError(
                f"trainer setting stager: {setting}, and no store is set for the stager to write to; set store "
                f"(HOLDFAST_STORE) on {rank}'s machine to the URL of the run"
            )
        self._config, self._store, self._share = config, config.store, own.share
        stager = StagerConfig.from_sources(store=config.store)
        self._runtime_dir, self._seconds_max = stager.runtime_dir, config.start_seconds_max
        listen = Address(_LOOPBACK if one_machine else _ANY, 0)
        if stager.listen is not None:
            listen = parse_address(stager.listen)
        if config.tls_ca is not None and stager.tls_cert is None:
            raise ConfigError(
                f"trainer setting tls_ca: set, and the stager that {rank} starts has no tls_cert; give {rank}'s "
                "machine a certificate (HOLDFAST_TLS_CERT and HOLDFAST_TLS_KEY), or unset tls_ca"
            )
        if listen.is_loopback and not one_machine:
            raise ConfigError(
                f"stager setting listen: {listen} is reached from {rank}'s machine alone, and this job has ranks on "
                f"other machines; set HOLDFAST_LISTEN to an address of {rank}'s machine that they reach, or unset it"
            )
        self._listen, self._host = listen, listen.host
        if listen.host in _ANY_ADDRESS:
            self._host = _LOOPBACK if one_machine else _own_host(is_master=own.root == 0)
        key = None if stager.key is None else stager.key.get_secret_value()
        self._key = read_key(key, stager.key_file).decode() or new_key()
        self._process: subprocess.Popen[bytes] | None = None

    def find_living(self) -> OwnStagerEndpoint | None:
        """Return the living stager that this start of the job, or an earlier one, has started on this machine. One with
        another share, of a start with other nodes, must end first. PeerLost: not within `start_seconds_max`.
        """
        if self._process is not None:
            self._process.poll()  # reaps a dead stager
        deadline, is_logged = time.monotonic() + self._seconds_max, False
        while True:
            found = find_own_stager(self._store, self._runtime_dir)
            if found is None or found.share == str(self._share):
                return found
            what = f"the stager at {found.address}, which has share {found.share}"
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"{what}, did not end within {self._seconds_max:g} s; if an earlier start on other nodes has left "
                    f"it, see its log; if another node uses {self._runtime_dir} as well, give each node a directory of "
                    "its own in HOLDFAST_RUNTIME_DIR"
                )
            if not is_logged:
                is_logged = True
                _log.warning(
                    "waiting for %s, to end: one that an earlier start has left waits idle_seconds_max for its job",
                    what,
                )
            time.sleep(_POLL_SECONDS)

    def start(self) -> OwnStagerEndpoint:
        """Start the stager, at its last address if it had one, and wait until it listens. Raises the error with which
        it has ended; PeerLost: it gave none, or does not listen within `start_seconds_max`.
        """
        log = log_path("stager", self._store)
        with log.open("ab") as end:
            self._process = subprocess.Popen(
                self._command_line(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=end,
                start_new_session=True,  # so that neither Ctrl-C nor the end of the ranks ends the stager
                env=self._environment(),
            )
        output = self._process.stdout
        assert output is not None
        try:
            line = within(lambda: _first_line(output), self._seconds_max, name="holdfast-own-stager")
        except TimeoutError:
            self._process.kill()
            raise PeerLost(
                f"the stager that {self._rank} has started (process {self._process.pid}) does not listen within "
                f"{self._seconds_max:g} s, and was ended; see {log}"
            ) from None
        try:
            place = parse_first_line(line)._replace(key=self._key)
        except ValueError:
            self._process.wait()
            raise PeerLost(
                f"the stager that {self._rank} has started has ended before it listened; the end of its log "
                f"({log}):\n{last_lines(log)}"
            ) from None
        self._listen = self._listen._replace(port=parse_address(place.address).port)
        _log.info("started a stager of this job at %s, its log is %s", place.address, log)
        return place

    def adopt(self, place: OwnStagerEndpoint) -> None:
        """Adopt the key and port of a living stager: if it dies, it is restarted there."""
        self._key = place.key
        self._listen = self._listen._replace(port=parse_address(place.address).port)

    def _command_line(self) -> list[str]:
        config = self._config
        line = [sys.executable, "-P", "-m", "holdfast", "stager", "--own", self._host]
        line += ["--listen", str(self._listen), "--store", self._store]
        if self._share != WHOLE:
            line += ["--share", str(self._share)]
        if config.create:
            line.append("--create")
        if config.events is not None:
            line += ["--events", str(config.events)]
        if "chunk_bytes" in config.model_fields_set:
            line += ["--chunk-bytes", str(config.chunk_bytes)]
        return line

    def _environment(self) -> dict[str, str]:
        kept = (one for one in os.environ.items() if not one[0].startswith(_HIDDEN_VARIABLES))
        return {**dict(kept), "HOLDFAST_KEY": self._key}


class StartedStager:
    """A rank's connection to the own stager, or to the one that `stager` names while that can be reached
    (`on_stager_lost="own"`). Construction is collective: rank 0 finds or starts the stager, and all ranks connect.
    Main thread; `reconnect` from any thread.

    `announcements`: None: the stager keeps its address. `own`: Which of the job's stagers it is; rank `own.root` does
    for it what rank 0 does for the only one. HoldfastError, on every rank: the stager could not be started, or a rank
    does not reach it.
    """

    def __init__(
        self,
        config: TrainerConfig,
        peers: Peers,
        start: JobStart,
        *,
        one_machine: bool,
        announcements: StoreAnnouncements | None = None,
        own: OwnShare = _ONLY_SHARE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._rank, self._ranks, self._start = config, peers.rank, peers.ranks, start
        self._announcements, self._own, self._clock = announcements, own, clock
        named = config.stager if config.stager not in (OWN_STAGER, OWN_PER_NODE) else None
        self._named = None if named is None else OwnStagerEndpoint(named, "")
        self._place = self._named or OwnStagerEndpoint("", "")
        self._named_lost_at: float | None = None  # the named one
        self._process: StagerStarter | None = None
        port: TcpStagerPort | None = None
        error: HoldfastError | None = None
        if peers.rank == own.root:
            try:
                self._process = StagerStarter(config, one_machine=one_machine, own=own)
                port = self._find_or_start(self._process)
            except HoldfastError as failed:
                error = failed
        raise_agreed(peers, error)
        self._place = OwnStagerEndpoint.from_bytes(
            peers.broadcast(self._place.to_bytes() if peers.rank == own.root else None, own.root)
        )
        if port is None:
            try:
                port = self._connect(0, config.start_seconds_max)
            except PeerLost as lost:
                error = PeerLost(
                    f"{lost}. Rank {own.root} has started this stager on its machine: open the port to the other "
                    f"machines, or set HOLDFAST_LISTEN to HOST:PORT of rank {own.root}'s machine, as they reach it"
                )
            except HoldfastError as failed:
                error = failed
        raise_agreed(peers, error)
        assert port is not None
        self.port = port  # of the newest generation

    def reconnect(self, generation: int, lead_attempt: int = 0) -> TcpStagerPort:
        """As `World.reconnect`. Rank `own.root` restarts a dead own stager. Rank 0 replaces a named one that was lost
        for `own_after_seconds`, and the other ranks follow its announcement.
        """
        seconds_max = self._config.reconnect_seconds_max
        self._own = self._own._replace(lead_attempt=lead_attempt)
        if self._process is None:
            announced = b"" if self._announcements is None else self._announcements.latest()
            if announced:
                self._place = OwnStagerEndpoint.from_bytes(announced)
        elif self._process.find_living() is None:
            if self._named is None:
                _log.warning("the stager that rank %d has started has died; it is started again", self._rank)
                self._process.start()
            else:
                self._switch_to(self._named)
        try:
            self.port = self._connect(generation, seconds_max)
        except PeerLost:
            if self._process is None or self._named is None or not self._is_lost_for_long():
                raise
            _log.warning(
                "the stager at %s was not reached for %g s; rank 0 starts one for this job on its machine",
                self._named.address,
                self._config.own_after_seconds,
            )
            self._switch_to(self._process.start())
            self.port = self._connect(generation, seconds_max)
        else:
            if self._place == self._named:
                self._named_lost_at = None
        return self.port

    def _is_lost_for_long(self) -> bool:
        """Whether the named stager was not reached for `own_after_seconds`, since the first try that failed."""
        if self._named_lost_at is None:
            self._named_lost_at = self._clock() - self._config.reconnect_seconds_max
        return self._clock() - self._named_lost_at >= self._config.own_after_seconds

    def _switch_to(self, place: OwnStagerEndpoint) -> None:
        if place != self._place:
            self._place = place
            if self._announcements is not None:
                self._announcements.announce(place.to_bytes())

    def _find_or_start(self, process: StagerStarter) -> TcpStagerPort:
        seconds_max = self._config.start_seconds_max
        found = process.find_living()
        if found is not None:
            self._place = found
            # A stager that is just ending refuses: start another one.
            with contextlib.suppress(PeerLost):
                port = self._connect(0, seconds_max)
                process.adopt(found)
                return port
        if self._named is not None:
            self._place = self._named
            with contextlib.suppress(PeerLost):
                return self._connect(0, min(seconds_max, self._config.own_after_seconds))
            _log.warning(
                "the stager at %s does not answer; rank 0 starts one for this job on its machine",
                self._named.address,
            )
        self._place = process.start()
        return self._connect(0, seconds_max)

    def _connect(self, generation: int, seconds_max: float) -> TcpStagerPort:
        config, key = self._config, self._place.key.encode()
        if not key:
            key = read_key(None if config.key is None else config.key.get_secret_value(), config.key_file)
        return connect_to_stager(
            config,
            StagerTarget(self._place.address, key or None, self._own.lead_attempt),
            rank=self._rank,
            ranks=self._ranks,
            start=self._start._replace(generation=generation),
            seconds_max=seconds_max,
        )


def _own_host(*, is_master: bool) -> str:
    """Guess the address at which other machines reach this one: MASTER_ADDR on rank 0's, else that of a route."""
    master_address = os.environ.get("MASTER_ADDR", "")
    if Address(master_address, 0).is_loopback:
        master_address = ""
    if master_address and is_master:
        return master_address
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master_address, _PROBE_ADDRESS[1]) if master_address else _PROBE_ADDRESS)
        return str(probe.getsockname()[0])
    return socket.gethostname()


def _first_line(output: IO[bytes]) -> bytes:
    """Read the first line, or all output if it ends before."""
    with output:
        return output.readline(_LINE_BYTES_MAX)
