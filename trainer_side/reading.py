"""Reads a portable file straight into tensor memory, shared out among the ranks, every byte checked.

    chunks 0 … C: rank r reads r*C/R … (r+1)*C/R
      └ runs: one request each ─► into the tensors, or into scratch and from there ─► CRC of the chunk ─► share

1. The CRC-32 of a chunk is that of its runs in order, computed from the memory into which the store wrote.
2. A chunk that is read and checked is shared with the other ranks while the next ones are read. The turns go round the
   ranks (first chunk of each, second chunk of each, …), so each rank makes the same `share` calls in the same order.
3. A rank that meets damage goes on sharing, whatever its memory holds: the order of calls must not break. Its error is
   returned, and the ranks agree afterwards.
4. What came from other ranks is checked by the entries' own CRCs: that hop may flip a bit, too.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from holdfast.crc import crc32
from holdfast.errors import DamageError, HoldfastError, StoreError
from holdfast.manifest import Manifest
from holdfast.storage.base import Store
from trainer_side.peers import Peers
from trainer_side.windows import RUN_BYTES, Run, Windows

__all__ = ["Reading", "Target", "check_received", "read"]

_log = logging.getLogger("holdfast.restore")
# Not more broadcasts at a time; waiting for them is also what moves them on, while the readers go on reading.
_SHARES_IN_FLIGHT = 64
_T = TypeVar("_T")
_R = TypeVar("_R")


class Target(NamedTuple):
    """Where the bytes of one entry go."""

    address: int
    memory: memoryview

    @classmethod
    def of(cls, storage: torch.UntypedStorage) -> Target:
        """The memory of a CPU storage; the view keeps the storage alive."""
        return cls(storage.data_ptr(), torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data)


@dataclass
class Reading:
    """How one reading went, on this rank.

    Attributes:
        error: Why the bytes cannot be used, if so; then the targets hold anything.
        bytes_read: From the store.
        seconds: `read`: until this rank's own chunks were there; `exchange`: from then until everybody's were.
    """

    error: HoldfastError | None = None
    bytes_read: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


def read(
    store: Store,
    manifest: Manifest,
    targets: Mapping[int, Target],
    peers: Peers,
    *,
    threads: int,
    seconds_max: float,
) -> Reading:
    """Fill every target on every rank. Collective; training thread.

    Args:
        store: Where the file is.
        manifest: Its manifest.
        targets: Entry index → memory of exactly the entry's size; the same entries on each rank, not overlapping.
        peers: The ranks.
        threads: Requests in flight from this rank.
        seconds_max: For reading, and again for the exchange.

    Returns:
        With `error` set to the first problem: `DamageError` (a CRC does not hold, the file is short) or `StoreError`.

    Raises:
        PeerLost: A rank is gone.
    """
    chunks = _Chunks(store, manifest, targets)
    shares = [_share_of(manifest, rank, peers.ranks) for rank in range(peers.ranks)]
    outcome = Reading()
    begun = time.monotonic()
    deadline = begun + seconds_max
    readings = dict(
        zip(shares[peers.rank], _start(chunks.read, shares[peers.rank], threads, "read"), strict=True)
    )
    own_done, shared = begun, 0
    for turn in range(max(len(share) for share in shares)):
        for root, share in enumerate(shares):
            if turn >= len(share):
                continue
            chunk = share[turn]
            if root == peers.rank:
                _await(
                    readings[chunk], deadline, outcome, chunks, f"{store.url}/{manifest.file} chunk {chunk}"
                )
                own_done = time.monotonic()
            if peers.ranks > 1:
                peers.share(chunks.pieces(chunk), root)
                shared += 1
                if shared % _SHARES_IN_FLIGHT == 0:
                    peers.finish(deadline + seconds_max - time.monotonic())
    _settle(readings.values(), deadline, outcome, f"{store.url}/{manifest.file}")
    outcome.seconds["read"] = own_done - begun
    outcome.bytes_read = chunks.bytes_read
    if peers.ranks > 1:
        peers.finish(deadline + seconds_max - time.monotonic())
        outcome.seconds["exchange"] = time.monotonic() - own_done
    return outcome


def _await(reading: Future[int], deadline: float, outcome: Reading, chunks: _Chunks, what: str) -> None:
    """Wait for one of this rank's chunks; the first error stays, and stops the readers."""
    if outcome.error is not None:
        return
    try:
        reading.result(max(0.0, deadline - time.monotonic()))
    except HoldfastError as error:
        outcome.error = error
    except TimeoutError:
        outcome.error = _late(what)
    if outcome.error is not None:
        chunks.stop()


def _settle(readings: Iterable[Future[int]], deadline: float, outcome: Reading, what: str) -> None:
    """Wait until no reader writes any more: after damage the next candidate is read into the same memory."""
    _, running = wait(readings, max(0.0, deadline - time.monotonic()))
    if running:
        outcome.error = _late(what)


def _late(what: str) -> StoreError:
    return StoreError(
        f"{what}: not read within the time for restoring; is the store slow or hanging?", retriable=True
    )


class _Chunks:
    """The chunks of one file: what lies in them, and where it goes. `read` may be called from several threads."""

    def __init__(self, store: Store, manifest: Manifest, targets: Mapping[int, Target]) -> None:
        self._store, self._manifest, self._targets = store, manifest, targets
        self._windows = Windows(manifest, targets)
        self._local = threading.local()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self.bytes_read = 0

    def stop(self) -> None:
        """Let the readers find nothing more to do."""
        self._stopped.set()

    def pieces(self, chunk: int) -> list[tuple[int, int]]:
        """`(address, nbytes)` of the entries' bytes in a chunk, in order."""
        return [
            (self._targets[part.entry].address + part.inside, part.nbytes)
            for part in self._windows.parts(chunk)
        ]

    def read(self, chunk: int) -> int:
        """Read one chunk into its targets; returns its size in bytes.

        Raises:
            DamageError: Its CRC-32 is not the one in the manifest, or the file ends within it.
            StoreError: The store failed.
        """
        total, nbytes = 0, 0
        for run in self._windows.runs(chunk):
            if self._stopped.is_set():
                return 0
            total = self._read_direct(run, total) if run.direct else self._read_gathered(run, total)
            nbytes += run.nbytes
        expected = self._manifest.chunk_crc32s[chunk]
        if total != expected:
            raise DamageError(
                f"{self._store.url}/{self._manifest.file}: chunk {chunk} ({nbytes} bytes from "
                f"{chunk * self._manifest.chunk_bytes}): CRC-32 expected {expected:08x}, got {total:08x}"
            )
        with self._lock:
            self.bytes_read += nbytes
        return nbytes

    def _read_direct(self, run: Run, crc: int) -> int:
        (part,) = run.parts
        view = self._targets[part.entry].memory[part.inside : part.inside + part.nbytes]
        self._store.read_into(self._manifest.file, part.offset, view)
        return crc32(view, crc)

    def _read_gathered(self, run: Run, crc: int) -> int:
        address, scratch = self._scratch()
        view = scratch[: run.nbytes]
        self._store.read_into(self._manifest.file, run.offset, view)
        for part in run.parts:
            # memmove gives the GIL back, so other readers go on.
            ctypes.memmove(
                self._targets[part.entry].address + part.inside,
                address + part.offset - run.offset,
                part.nbytes,
            )
        return crc32(view, crc)

    def _scratch(self) -> Target:
        """This thread's scratch memory: taken once, because first touch of fresh pages is slow."""
        scratch: Target | None = getattr(self._local, "scratch", None)
        if scratch is None:
            nbytes = min(RUN_BYTES, self._manifest.chunk_bytes, self._manifest.image_bytes)
            scratch = self._local.scratch = Target.of(
                torch.empty(nbytes, dtype=torch.uint8).untyped_storage()
            )
        return scratch


def _share_of(manifest: Manifest, rank: int, ranks: int) -> range:
    """The chunks that a rank reads."""
    chunks = len(manifest.chunk_crc32s)
    return range(rank * chunks // ranks, (rank + 1) * chunks // ranks)


def check_received(
    manifest: Manifest, targets: Mapping[int, Target], peers: Peers, *, threads: int
) -> DamageError | None:
    """Compare the CRC of each entry of which other ranks have sent something with the manifest's.

    For when every rank has read its chunks without an error: else the fault lies there.
    """
    own = _share_of(manifest, peers.rank, peers.ranks)
    begin, end = own.start * manifest.chunk_bytes, own.stop * manifest.chunk_bytes

    def check(index: int) -> bool:
        return crc32(targets[index].memory) == manifest.entries[index].crc32

    received = [
        index
        for index in targets
        if manifest.entries[index].nbytes
        and (
            manifest.entries[index].offset < begin
            or manifest.entries[index].offset + manifest.entries[index].nbytes > end
        )
    ]
    for index, result in zip(received, _start(check, received, threads, "check"), strict=True):
        if not result.result():
            entry = manifest.entries[index]
            return DamageError(
                f"{manifest.file}: entry {entry.name} ({entry.nbytes} bytes at {entry.offset}): its CRC-32 is not "
                f"{entry.crc32:08x} after the exchange among the ranks, although every chunk was read whole"
            )
    return None


def _start(work: Callable[[_T], _R], items: Iterable[_T], threads: int, name: str) -> list[Future[_R]]:
    """Run `work` on each item, in order, in `threads` threads.

    Daemon threads, not a pool: the interpreter would wait at its end for a request that hangs.
    """
    pending: queue.SimpleQueue[tuple[_T, Future[_R]]] = queue.SimpleQueue()
    futures: list[Future[_R]] = []
    for item in items:
        futures.append(Future())
        pending.put((item, futures[-1]))

    def serve() -> None:
        while True:
            try:
                item, future = pending.get_nowait()
            except queue.Empty:
                return
            try:
                future.set_result(work(item))
            except BaseException as error:  # noqa: BLE001 - handed to the thread that waits for it
                future.set_exception(error)

    for number in range(min(threads, len(futures))):
        threading.Thread(target=serve, name=f"holdfast-{name}-{number}", daemon=True).start()
    return futures
