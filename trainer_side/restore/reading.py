"""Reads an image straight into tensor memory: divided among the ranks, with every byte checked.

    units: each has a rank that reads it, and an origin: a chunk of the portable file, or a frame of a slice in a tier
      └ runs: one request each ─► a reader's window ─► CRC-32 of each part ─► into the tensors ─► share

1. Each reader reuses one window for all its runs: store and tiers write into it past the page cache, and its bytes are
   checked and copied while they are still in the processor's cache. Besides the tensors, at most `threads` windows are
   in memory, and those of hanging threads.
2. The CRC-32 of a unit is combined from those of its parts and of the gaps between them: no byte is summed twice.
3. A checked unit is shared while the next ones are read. The ranks take turns (first unit of each, second unit of each,
   …), so each rank makes the same `share` calls in the same order. A rank that finds damage keeps sharing, although its
   memory is undefined; the ranks agree on its error afterwards.
4. A unit that a tier cannot provide does not stop the others: `slice_reader.py` reads it from elsewhere. A failure of
   the store ends the read.
5. If a request to a tier does not return in time, its device hangs: this rank abandons all its requests to that tier,
   and new threads replace the blocked ones. Bytes that arrive later stay in their windows.
"""

from __future__ import annotations

import bisect
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.crc import combine_all
from holdfast.errors import DamageError, HoldfastError, StoreError
from holdfast.faultpoint import Point, reach
from trainer_side.ranks.deadlines import BoundedThreads
from trainer_side.ranks.peers import Peers
from trainer_side.restore.broadcast import Broadcast
from trainer_side.restore.choice import STORE
from trainer_side.restore.device_sections import DeviceSections, SectionPart, SectionWindow, section_bytes
from trainer_side.restore.exchange import Exchange
from trainer_side.restore.read_plan import Origin, Unit, reader_count
from trainer_side.restore.scatter import Scatter
from trainer_side.restore.structure import ImageMap
from trainer_side.restore.targets import ChunkWindows, EntrySink, ReadRun, ReadWindow, Sum

# Broadcasts in flight. Waiting for them also drives them, while the readers keep reading.
_SHARES_IN_FLIGHT = 64
_READS_MAX = 2
_POLL_SECONDS = 4e-3  # between polls of the exchange while this rank waits for its own next unit
_CHECK_SECONDS = 50e-3  # between checks for hanging requests while there is no exchange to poll
_PAGE_BYTES = 4096


class Failure(NamedTuple):
    """A unit that a tier could not provide."""

    unit: Unit
    error: HoldfastError
    broken: bool  # the whole slice is unreadable
    hangs: bool = False  # this rank's whole tier hangs


@dataclass
class SourceUsage:
    """Bytes read from one tier, or from the store."""

    nbytes: int = 0
    seconds: float = 0.0  # from the first request to the end of the last one


@dataclass
class Reading:
    """Result of `read` on this rank."""

    error: HoldfastError | None = None  # why the bytes cannot be used; the targets are then undefined
    failures: list[Failure] = field(default_factory=list)  # their parts of the targets are undefined
    bytes_read: int = 0
    # `read`: until this rank's own units were read; `exchange`: from then until those of all ranks had arrived.
    seconds: dict[str, float] = field(default_factory=dict)
    # CRC of each part that this rank read, by its offset in the image.
    sums: dict[int, Sum] = field(default_factory=dict)
    # CRC of each part from another rank that came through a window, and is no longer in one piece.
    received: dict[int, Sum] = field(default_factory=dict)
    usage: dict[str, SourceUsage] = field(default_factory=dict)

    def add(self, other: Reading) -> None:
        """Add the counts of another result, without its error and failures."""
        self.bytes_read += other.bytes_read
        self.sums.update(other.sums)
        self.received.update(other.received)
        for phase, seconds in other.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        for tier, use in other.usage.items():
            before = self.usage.setdefault(tier, SourceUsage())
            before.nbytes += use.nbytes
            before.seconds += use.seconds


class ReadOptions(NamedTuple):
    """How a rank reads."""

    threads: int | None  # requests in flight from this rank; None: as many as suit the origins
    seconds_max: float  # for reading, and again for the exchange
    # Transfers to the device of some targets; None: all targets of this rank are in host memory.
    device_sections: DeviceSections | None = None


def sharing_order(units: Sequence[Unit], ranks: int) -> list[Unit]:
    """Return the units in the order in which they are shared."""
    by_rank: list[list[Unit]] = [[] for _ in range(ranks)]
    for unit in units:
        by_rank[unit.reader].append(unit)
    return [unit for turn in itertools.zip_longest(*by_rank) for unit in turn if unit is not None]


def read(
    image: ImageMap,
    units: Sequence[Unit] | Scatter,
    origins: Mapping[int, Origin],
    targets: Mapping[int, EntrySink],
    peers: Peers,
    read_options: ReadOptions,
) -> Reading:
    """Fill the targets of every rank from the units. Collective; training thread.

    `units`: The same on every rank. Every rank gets all their bytes, or with a `Scatter` only the regions that it
    holds. `origins`: Sources of this rank's own units, by `Unit.number`. `targets`: Entry index → memory of exactly the
    entry's size, or the parts of it that this rank keeps; the same entries, with the same kind of target, on each rank;
    not overlapping. Bytes for a device may still be in flight when this returns (`DeviceSections.finish`).

    `Reading.error` is the first problem that no other source can fix: a CRC of the store is wrong, the file is short,
    or the store failed. PeerLost: a rank is gone.
    """
    exchange: Exchange | None = units if isinstance(units, Scatter) else None
    units = units.units if isinstance(units, Scatter) else units
    own = [unit for unit in units if unit.reader == peers.rank]
    windows = ChunkWindows(image, targets)
    if exchange is None and peers.ranks > 1:
        exchange = Broadcast(image, windows, targets, own, read_options.device_sections)
    pool = ReaderPool(image, origins, targets, windows, exchange, read_options)
    outcome = pool.outcome
    begun = own_done = time.monotonic()
    deadline = begun + read_options.seconds_max
    pool.start(own)
    shared = 0
    for unit in sharing_order(units, peers.ranks):
        if unit.reader == peers.rank:
            pool.wait_for_unit(unit, deadline, peers)
            own_done = time.monotonic()
        if exchange is not None:
            exchange.share(unit, peers)
            shared += 1
            if shared % _SHARES_IN_FLIGHT == 0 or exchange.is_full:
                peers.finish(deadline + read_options.seconds_max - time.monotonic())
                exchange.process_received()
    pool.wait_for_readers(deadline)
    outcome.seconds["read"] = own_done - begun
    if exchange is not None:
        peers.finish(deadline + read_options.seconds_max - time.monotonic())
        exchange.process_received()
        outcome.received, outcome.error = exchange.received, outcome.error or exchange.error
        outcome.seconds["exchange"] = time.monotonic() - own_done
    pool.close()
    return outcome


def _timeout_error(what: str) -> StoreError:
    return StoreError(
        f"{what}: not read within the time for restoring; is the store slow or hanging?", retriable=True
    )


class ReaderPool:
    """This rank's readers, and the origins and targets that they share. `read` may be called from several threads."""

    def __init__(
        self,
        image: ImageMap,
        origins: Mapping[int, Origin],
        targets: Mapping[int, EntrySink],
        windows: ChunkWindows,
        exchange: Exchange | None,
        read_options: ReadOptions,
    ) -> None:
        self._threads, self._seconds_max, self._device_sections = read_options
        self._origins, self._targets = origins, targets
        self._windows, self._exchange = windows, exchange
        self._largest = max((origin.request_bytes for origin in origins.values()), default=_PAGE_BYTES)
        self._unit_bytes = min(image.chunk_bytes, image.image_bytes)
        self._request_bytes = min(self._largest, self._unit_bytes)
        self._section_bytes = self._request_bytes
        self._local = threading.local()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._readings: dict[Unit, Future[None]] = {}
        self._broken: dict[int, HoldfastError] = {}
        # By thread: the request in flight, and when its tier counts as hanging.
        self._requests: dict[int, tuple[Unit, float]] = {}
        self._hanging: set[str] = set()  # tiers
        self._lost: set[Unit] = set()  # units whose reader hangs
        self._begun: dict[str, float] = {}  # the first request to each tier
        self.outcome = Reading()  # counts units whose CRC was right

    def start(self, own: Sequence[Unit]) -> None:
        """Start to read this rank's units, in order."""
        used = (self._origins[number] for number in {unit.number for unit in own})
        threads = self._threads or reader_count(used)
        if self._device_sections is not None:
            sections = max(self._largest, section_bytes(threads)) // self._request_bytes * self._request_bytes
            self._section_bytes = min(sections, self._unit_bytes)
        self._readers = BoundedThreads(self.read, own, threads, "read")
        self._readings = dict(zip(own, self._readers.futures, strict=True))

    def close(self) -> None:
        """Close the origins, and break the reference cycles that would keep the targets until a collection."""
        for origin in self._origins.values():
            origin.close()
        self._readings, self.outcome = {}, Reading()  # their errors refer to the frames of readers
        del self._readers

    def wait_for_unit(self, unit: Unit, deadline: float, peers: Peers) -> None:
        """Wait for one of this rank's units. The first error that no other source can fix stops the readers."""
        outcome, reading = self.outcome, self._readings[unit]
        if outcome.error is not None:
            return
        lost: HoldfastError | None = None
        while not reading.done() and lost is None and time.monotonic() < deadline:
            if peers.ranks > 1:
                peers.poll()
            wait([reading], _POLL_SECONDS if peers.ranks > 1 else _CHECK_SECONDS)
            lost = self._check_hanging(unit)
        try:
            if lost is not None:
                raise lost
            reading.result(max(0.0, deadline - time.monotonic()))
        except HoldfastError as error:
            if unit.number == STORE:
                outcome.error = error
            else:
                hangs = self._origins[unit.number].tier in self._hanging
                outcome.failures.append(Failure(unit, error, not isinstance(error, DamageError), hangs))
        except TimeoutError:
            outcome.error = _timeout_error(self._describe(unit))
        if outcome.error is not None:
            self._stopped.set()

    def wait_for_readers(self, deadline: float) -> None:
        """Wait until all readers are done: after damage, the next candidate is read into the same memory."""
        for unit, reading in self._readings.items():
            while not reading.done() and self._check_hanging(unit) is None:
                if time.monotonic() > deadline:
                    self.outcome.error = _timeout_error(self._origins[unit.number].what)
                    return
                wait([reading], _CHECK_SECONDS)

    def _check_hanging(self, unit: Unit) -> HoldfastError | None:
        """Detect hanging requests, and replace their threads. Return why `unit` will not arrive, or None."""
        now = time.monotonic()
        with self._lock:
            for late, limit in self._requests.values():
                if now > limit:
                    self._abandon_tier(late)
            stuck = {
                thread: one
                for thread, (one, _) in self._requests.items()
                if self._origins[one.number].tier in self._hanging
            }
            for thread, one in stuck.items():
                del self._requests[thread]
                self._lost.add(one)
            lost = self._broken[unit.number] if unit in self._lost else None
        self._readers.add_threads(len(stuck))
        return lost

    def _abandon_tier(self, unit: Unit) -> None:
        """Send no more requests to the tier of this unit. The caller holds the lock."""
        origin = self._origins[unit.number]
        if origin.tier in self._hanging:
            return
        self._hanging.add(origin.tier)
        seconds = origin.seconds_share * self._seconds_max
        error = StoreError(
            f"{self._describe(unit)}: no bytes for {seconds:g} s, {origin.seconds_share:.0%} of "
            f"restore_seconds_max = {self._seconds_max:g} s: the device hangs, and this rank sends it no more "
            "requests; check the kernel log (dmesg), or remove it from tiers"
        )
        self._broken.update(
            (number, error) for number, other in self._origins.items() if other.tier == origin.tier
        )

    def _describe(self, unit: Unit) -> str:
        origin = self._origins[unit.number]
        return f"{origin.what}: {origin.locate(unit).what}"

    def read(self, unit: Unit) -> None:
        """Read one unit into its targets; retry once if its CRC differs, as a transfer may have flipped a bit.

        DamageError: its CRC-32 is wrong, or the origin ends within it. StoreError: store or tier failed.
        """
        origin = self._origins[unit.number]
        location = origin.locate(unit)
        if self._exchange is not None:
            self._exchange.wait_for_room(unit, self._stopped)
        begun = time.monotonic()
        parts = self._windows.parts(unit.extents)
        begins = [part.offset for part in parts]
        request_bytes = min(origin.request_bytes, self._request_bytes)
        for _ in range(_READS_MAX):
            sums: list[Sum] = []
            of_parts: list[list[Sum]] = [[] for _ in parts]
            section = _Section(self._window())
            for run in self._windows.runs(
                location.extents, location.offset, request_bytes, wanted=unit.extents
            ):
                if self._stopped.is_set():
                    return
                if not section.has_room(run.nbytes):
                    self._send_to_device(section)
                    section = _Section(self._window())
                for part_begin, found in self._read(unit, origin, run, sums, section):
                    of_parts[bisect.bisect_right(begins, part_begin) - 1].append(found)
            summed = combine_all(sums)
            if summed == location.crc32:
                self._send_to_device(section)
                break
        else:
            raise DamageError(
                f"{origin.what}: {location.what}: CRC-32 expected {location.crc32:08x}, got {summed:08x}"
            )
        nbytes = sum(s.nbytes for s in sums)
        with self._lock:
            self.outcome.bytes_read += nbytes
            usage = self.outcome.usage.setdefault(origin.tier, SourceUsage())
            self._begun[origin.tier] = min(begun, self._begun.get(origin.tier, begun))
            usage.nbytes, usage.seconds = usage.nbytes + nbytes, time.monotonic() - self._begun[origin.tier]
            for part, own in zip(parts, of_parts, strict=True):
                self.outcome.sums[part.offset] = Sum(combine_all(own), part.nbytes)

    def _read(
        self, unit: Unit, origin: Origin, run: ReadRun, sums: list[Sum], section: _Section
    ) -> list[tuple[int, Sum]]:
        """Read a run and copy its parts into their targets; return the sum of each part with its offset in the image.

        The sums of all its bytes are appended to `sums`, in order. Bytes for a device stay in the section.
        """
        first, view = section.reserve(run.nbytes)
        address = section.window.address + first
        me = threading.get_ident()
        limit = time.monotonic() + origin.seconds_share * self._seconds_max
        with self._lock:
            if unit.number in self._broken:
                raise self._broken[unit.number]
            self._requests[me] = unit, limit
        try:
            origin.read_into(run.offset, view)
        except StoreError as error:
            if unit.number != STORE:
                self._broken.setdefault(unit.number, error)
            raise
        finally:
            with self._lock:
                late = self._requests.pop(me, None) is None
        if late:  # abandoned while it hung: the targets may hold newer bytes by now
            raise self._broken[unit.number]
        reach(Point.RESTORE_READ)
        found: list[tuple[int, Sum]] = []
        position = 0
        for begin, part in zip(run.begins, run.parts, strict=True):
            if begin > position:
                sums.append(Sum.of(view[position:begin]))
            position = begin + part.nbytes
            sums.append(Sum.of(view[begin:position]))
            found.append((part.offset, sums[-1]))
            target = self._targets[part.entry]
            target.put(part.entry_offset, address + begin, view[begin:position])
            section.parts += target.parts(part.entry_offset, first + begin, part.nbytes)
            if self._exchange is not None:
                self._exchange.pack(unit, part, address + begin, view[begin:position])
        if position < run.nbytes:
            sums.append(Sum.of(view[position:]))
        return found

    def _send_to_device(self, section: _Section) -> None:
        if self._device_sections is not None and isinstance(section.window, SectionWindow):
            self._device_sections.send(section.window, section.parts)

    def _window(self) -> ReadWindow | SectionWindow:
        """Return this thread's window; with a device, the next of its page-locked windows."""
        if self._device_sections is not None:
            return self._device_sections.window(self._section_bytes)
        window: ReadWindow | None = getattr(self._local, "window", None)
        if window is None:
            window = self._local.window = ReadWindow.of_size(self._request_bytes)
        return window


class _Section:
    """A window that a reader fills, and the parts of it that go to a device."""

    def __init__(self, window: ReadWindow | SectionWindow) -> None:
        self.window = window
        self.parts: list[SectionPart] = []
        self._end = 0

    def has_room(self, nbytes: int) -> bool:
        return self._end + nbytes <= len(self.window.memory)

    def reserve(self, nbytes: int) -> tuple[int, memoryview]:
        """Return where the next `nbytes` of the window begin, and a view of them."""
        begin, self._end = self._end, self._end + nbytes
        return begin, self.window.memory[begin : self._end]
