"""The key-value store of a job without MPI: finding it, connections to it, and messages through it.

    torch.distributed's own, if the script has set it up ── else that of torchrun's agent ── else one that rank 0
    serves at MASTER_ADDR:MASTER_PORT ── else, for one rank, one in its memory

Every user of the store has its own connection: on a shared one, another user's blocking call would delay its calls.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _get_default_store

from holdfast.errors import ConfigError, PeerLost

_IDLE_SECONDS_MIN, _IDLE_SECONDS_MAX = 1e-3, 0.2
_IDLE_GROWTH = 1.3


class JobStore(NamedTuple):
    """The store that all ranks of this job reach."""

    store: Store  # a connection; in the process that serves the store, also the server
    place: str  # HOST:PORT; empty for a store in this process
    outlives_ranks: bool  # torchrun's agent serves it, not rank 0

    def connect(self, seconds_max: float) -> Store:
        if not self.place:
            return self.store
        host, _, port = self.place.rpartition(":")
        timeout = timedelta(seconds=seconds_max)
        with store_errors(self.place, "connecting to it"):
            return TCPStore(host, int(port), is_master=False, timeout=timeout, wait_for_workers=False)


def open_job_store(rank: int, ranks: int, seconds_max: float) -> JobStore:
    """Find the store, or on rank 0 serve it. ConfigError: the environment does not name it, or its kind carries no
    messages. PeerLost: it does not answer.
    """
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if torch.distributed.is_initialized():
        return _of_torch_distributed(ranks, has_agent, seconds_max)
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        if ranks == 1:
            return JobStore(HashStore(), "", outlives_ranks=False)
        raise ConfigError(
            f"rank {rank} of {ranks}: MASTER_ADDR and MASTER_PORT do not say where the ranks meet; start the job with "
            "torchrun, or set both to an address of rank 0's machine on every rank"
        )
    place = f"{host}:{port}"
    with store_errors(place, f"rank {rank} connecting to it"):
        store = TCPStore(
            host,
            int(port),
            is_master=rank == 0 and not has_agent,
            timeout=timedelta(seconds=seconds_max),
            wait_for_workers=False,
            multi_tenant=True,  # torch.distributed serves its own at the same place
        )
    return JobStore(store, place, outlives_ranks=has_agent)


def _of_torch_distributed(ranks: int, has_agent: bool, seconds_max: float) -> JobStore:
    store = _get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        own = JobStore(store, f"{store.host}:{store.port}", outlives_ranks=has_agent)
        return own._replace(store=own.connect(seconds_max))
    if ranks == 1:
        return JobStore(HashStore(), "", outlives_ranks=False)
    raise ConfigError(
        f"torch.distributed meets through a {type(store).__name__}, which carries no messages among the ranks; call "
        "init_torch_distributed(), or init_process_group() with init_method env:// or tcp://HOST:PORT"
    )


@contextmanager
def store_errors(place: str, what: str) -> Iterator[None]:
    """Turn torch's RuntimeError about the store into `PeerLost`."""
    try:
        yield
    except RuntimeError as error:
        at, reason = place or "this process", str(error).partition("\n")[0]
        raise PeerLost(f"the store of this job at {at} is lost, {what}: {reason}") from error


class StoreMailbox:
    """Messages among the ranks through the store: `RanksPort` and `CouncilPort`. One thread at a time.

    Each rank has one key. A sender appends a line to it; its owner takes all lines at once. A poll costs one round
    trip, so an idle mailbox polls less and less often. It must be the only user of the connection `store`.
    """

    def __init__(
        self,
        store: Store,
        place: str,
        *,
        rank: int,
        ranks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._place, self._clock = store, place, clock
        self.rank, self.ranks = rank, ranks
        self._idle_seconds, self._next_poll_at = 0.0, -1.0

    def send(self, rank: int, message: bytes) -> None:
        """As `RanksPort.send`. PeerLost: the store is lost."""
        self._idle_seconds, self._next_poll_at = 0.0, -1.0  # an answer may come soon
        line = f"{self.rank} {base64.b64encode(message).decode()}\n"
        with store_errors(self._place, f"rank {self.rank} sending to rank {rank}"):
            append(self._store, str(rank), line)

    def poll(self) -> list[tuple[int, bytes]]:
        """As `RanksPort.poll`. PeerLost: the store is lost."""
        now = self._clock()
        if now < self._next_poll_at:
            return []
        with store_errors(self._place, f"rank {self.rank} looking for messages"):
            text = consume(self._store, str(self.rank))
        if text:
            self._idle_seconds, self._next_poll_at = 0.0, -1.0
        else:
            grown = max(_IDLE_SECONDS_MIN, self._idle_seconds * _IDLE_GROWTH)
            self._idle_seconds = min(_IDLE_SECONDS_MAX, grown)
            self._next_poll_at = now + self._idle_seconds
        lines = (line.split(" ") for line in text.splitlines())
        return [(int(rank), base64.b64decode(message)) for rank, message in lines]

    def lost_ranks(self) -> frozenset[int]:
        """Return no rank: the store does not know which ranks are dead; deadlines find them."""
        return frozenset()

    def flush(self, seconds_max: float) -> None:  # noqa: ARG002 - the store answers or is lost
        with store_errors(self._place, f"rank {self.rank} sending its last messages"):
            self._store.check([str(self.rank)])


class StoreAnnouncements:
    """Rank 0 announces through the store which stager is the job's. One thread at a time. PeerLost: it is lost."""

    def __init__(self, store: Store, place: str) -> None:
        self._store, self._place = store, place

    def announce(self, data: bytes) -> None:
        with store_errors(self._place, "rank 0 saying which stager is the job's"):
            self._store.set("place", data.decode())

    def latest(self) -> bytes:
        """Return the last announcement; empty if there was none."""
        with store_errors(self._place, "asking which stager is the job's"):
            return bytes(self._store.compare_set("place", "", ""))


def append(store: Any, key: str, line: str) -> None:
    """Append to the value of a key. torch's type stubs lack this method."""
    store.append(key, line)


def consume(store: Store, key: str) -> str:
    """Take the text that was appended to a key; the key is empty afterwards."""
    text = store.compare_set(key, "", "")  # reads the key, and creates it if missing
    while text:
        now = store.compare_set(key, text.decode(), "")
        if not now:
            return text.decode()
        text = now  # more was appended meanwhile
    return ""
