"""Reads an image straight into tensor memory, shared out among the ranks, every byte checked.

    units: each has a rank that reads it, and an origin: a chunk of the portable file, or a frame of a slice in a tier
      └ runs: one request each ─► a reader's window ─► CRC-32 of each part ─► into the tensors ─► share

1. A window is touched once and used again for every run of its reader: store and tiers write into it past the page
   cache, and its bytes are checked and copied while they are still in the processor's cache. Never more than `threads`
   such windows are in memory beside the tensors, and those of threads that hang. For bytes that go to a device, a
   window takes all runs of a unit and crosses in one piece, while the next unit is read into a second window.
2. The CRC-32 of a unit is that of its parts and of what lies between them, combined: no byte is summed twice.
3. A unit that is read and checked is shared while the next ones are read (`exchange.py`). The turns go round the ranks
   (first unit of each, second unit of each, …), so each rank makes the same `share` calls in the same order.
4. A rank that finds damage keeps sharing, although its memory is undefined: the order of calls must not break. Its
   error is returned, and the ranks agree afterwards.
5. A unit that a tier cannot give does not stop the others: `slice_reader.py` reads it from elsewhere. A failure of the
   store ends the reading.
6. A request to a tier that does not return in time means that its device hangs: this rank gives up all its requests to
   that tier, and new threads replace those that wait there. Bytes that still arrive stay in their windows.
"""

from __future__ import annotations

import bisect
import logging
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
from trainer_side.restore.read_plan import Origin, Unit, readers_of
from trainer_side.restore.scatter import Scatter
from trainer_side.restore.structure import ImageMap
from trainer_side.restore.targets import ChunkWindows, EntryTaker, ReadRun, ReadWindow, Sum

_log = logging.getLogger("holdfast.restore")
# Not more broadcasts at a time; waiting for them is also what moves them on, while the readers go on reading.
_SHARES_IN_FLIGHT = 64
_READS_MAX = 2
_POLL_SECONDS = 4e-3  # how long the exchange rests while this rank waits for its own next unit
_LOOK_SECONDS = 50e-3  # how often a rank alone looks whether a request hangs
_PAGE_BYTES = 4096


class Failure(NamedTuple):
    """A unit that a tier could not give."""

    unit: Unit
    error: HoldfastError
    broken: bool  # that slice gives nothing at all any more
    hangs: bool = False  # nor does any other slice in this tier of this rank


@dataclass
class Use:
    """Count of the bytes that were read from one tier, or from the store."""

    nbytes: int = 0
    seconds: float = 0.0  # from the first request to the end of the last one


@dataclass
class Reading:
    """Result of one reading on this rank."""

    error: HoldfastError | None = None  # why the bytes cannot be used; the targets are then undefined
    failures: list[Failure] = field(default_factory=list)  # their parts of the targets are undefined
    bytes_read: int = 0
    # `read`: until this rank's own units were read; `exchange`: from then until those of all ranks had arrived.
    seconds: dict[str, float] = field(default_factory=dict)
    sums: dict[int, Sum] = field(
        default_factory=dict
    )  # of each part that was read here, by its place in the image
    received: dict[int, Sum] = field(
        default_factory=dict
    )  # of parts from others that are no longer in one piece
    uses: dict[str, Use] = field(default_factory=dict)

    def add(self, other: Reading) -> None:
        """Add the counts of another reading, without its error and failures."""
        self.bytes_read += other.bytes_read
        self.sums.update(other.sums)
        self.received.update(other.received)
        for phase, seconds in other.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        for tier, use in other.uses.items():
            before = self.uses.setdefault(tier, Use())
            before.nbytes += use.nbytes
            before.seconds += use.seconds


class Means(NamedTuple):
    """How a rank reads."""

    threads: int | None  # requests in flight from this rank; None: as many as suit the origins
    seconds_max: float  # for reading, and again for the exchange
    # The way to the device that some of the targets are on; None: this rank has none there.
    crossing: DeviceSections | None = None


def turns(units: Sequence[Unit], ranks: int) -> list[Unit]:
    """The units in the order in which they are shared."""
    of_rank: list[list[Unit]] = [[] for _ in range(ranks)]
    for unit in units:
        of_rank[unit.reader].append(unit)
    rounds = range(max((len(own) for own in of_rank), default=0))
    return [own[turn] for turn in rounds for own in of_rank if turn < len(own)]


def read(
    image: ImageMap,
    units: Sequence[Unit] | Scatter,
    origins: Mapping[int, Origin],
    targets: Mapping[int, EntryTaker],
    peers: Peers,
    means: Means,
) -> Reading:
    """Fill the targets of every rank from the units. Collective; training thread.

    `units`: The same on every rank. Every rank gets all their bytes, or with a `Scatter` only the regions that it
    holds. `origins`: One for each number in this rank's own units. `targets`: Entry index → memory of exactly the
    entry's size, or the parts of it that this rank keeps; the same entries, with the same kind of target, on each rank;
    not overlapping. Bytes for a device may still be in flight when this returns (`DeviceSections.finish`).

    `Reading.error` is the first problem that another source would not fix: a CRC of the store is wrong, the file is
    short, or the store failed. PeerLost: a rank is gone.
    """
    threads, seconds_max, crossing = means
    exchange: Exchange | None = units if isinstance(units, Scatter) else None
    units = units.units if isinstance(units, Scatter) else units
    own = [unit for unit in units if unit.reader == peers.rank]
    windows = ChunkWindows(image, targets)
    if exchange is None and peers.ranks > 1:
        exchange = Broadcast(image, windows, targets, own, crossing)
    pool = ReaderPool(image, origins, targets, windows, exchange, seconds_max, crossing)
    what = origins[own[0].number].what if own else ""
    outcome = Reading()
    begun = time.monotonic()
    deadline = begun + seconds_max
    used = [origins[number] for number in {unit.number for unit in own}]
    readings = pool.start(own, threads or readers_of(used))
    own_done, shared = begun, 0
    for unit in turns(units, peers.ranks):
        if unit.reader == peers.rank:
            _await(unit, readings[unit], deadline, outcome, pool, peers)
            own_done = time.monotonic()
        if exchange is not None:
            exchange.share(unit, peers)
            shared += 1
            if shared % _SHARES_IN_FLIGHT == 0 or exchange.is_full:
                peers.finish(deadline + seconds_max - time.monotonic())
                exchange.settle()
    _settle(readings, deadline, outcome, pool, what)
    outcome.seconds["read"] = own_done - begun
    outcome.bytes_read, outcome.sums, outcome.uses = pool.bytes_read, pool.sums, pool.uses()
    if exchange is not None:
        peers.finish(deadline + seconds_max - time.monotonic())
        exchange.settle()
        outcome.received, outcome.error = exchange.received, outcome.error or exchange.error
        outcome.seconds["exchange"] = time.monotonic() - own_done
    pool.let_go()
    return outcome


def _await(
    unit: Unit, reading: Future[None], deadline: float, outcome: Reading, pool: ReaderPool, peers: Peers
) -> None:
    """Wait for one of this rank's units; the first error that no other source mends stays, and stops the readers."""
    if outcome.error is not None:
        return
    lost: HoldfastError | None = None
    while not reading.done() and lost is None and time.monotonic() < deadline:
        if peers.ranks > 1:
            peers.poll()
        wait([reading], _POLL_SECONDS if peers.ranks > 1 else _LOOK_SECONDS)
        lost = pool.look(unit)
    try:
        if lost is not None:
            raise lost
        reading.result(max(0.0, deadline - time.monotonic()))
    except HoldfastError as error:
        if unit.number == STORE:
            outcome.error = error
        else:
            broken = not isinstance(error, DamageError)
            outcome.failures.append(Failure(unit, error, broken, pool.hangs(unit)))
    except TimeoutError:
        outcome.error = _late(pool.name(unit))
    if outcome.error is not None:
        pool.stop()


def _settle(
    readings: Mapping[Unit, Future[None]], deadline: float, outcome: Reading, pool: ReaderPool, what: str
) -> None:
    """Wait until no reader writes any more: after damage the next candidate is read into the same memory."""
    for unit, reading in readings.items():
        while not reading.done() and pool.look(unit) is None:
            if time.monotonic() > deadline:
                outcome.error = _late(what)
                return
            wait([reading], _LOOK_SECONDS)


def _late(what: str) -> StoreError:
    return StoreError(
        f"{what}: not read within the time for restoring; is the store slow or hanging?", retriable=True
    )


class _Request(NamedTuple):
    """A read that has not returned. `limit` is the time by which it should have."""

    unit: Unit
    limit: float


class ReaderPool:
    """The origins and targets that this rank's readers share. `read` may be called from several threads."""

    def __init__(
        self,
        image: ImageMap,
        origins: Mapping[int, Origin],
        targets: Mapping[int, EntryTaker],
        windows: ChunkWindows,
        exchange: Exchange | None,
        seconds_max: float,
        crossing: DeviceSections | None = None,
    ) -> None:
        self._crossing = crossing
        self._origins, self._targets, self._seconds_max = origins, targets, seconds_max
        self._windows, self._exchange = windows, exchange
        self._largest = max((origin.request_bytes for origin in origins.values()), default=_PAGE_BYTES)
        self._unit_bytes = min(image.chunk_bytes, image.image_bytes)
        self._request_bytes = min(self._largest, self._unit_bytes)
        self._section_bytes = self._request_bytes
        self._local = threading.local()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._broken: dict[int, HoldfastError] = {}
        self._requests: dict[int, _Request] = {}  # by thread
        self._hanging: set[str] = set()  # tiers
        self._lost: set[Unit] = set()  # whose reader hangs
        self._spans: dict[str, tuple[float, float, int]] = {}
        self.bytes_read = 0  # of units whose CRC was right
        self.sums: dict[int, Sum] = {}  # of each part in them, by its place in the image

    def start(self, own: Sequence[Unit], threads: int) -> dict[Unit, Future[None]]:
        """Begin to read this rank's units, in order."""
        if self._crossing is not None:
            sections = max(self._largest, section_bytes(threads)) // self._request_bytes * self._request_bytes
            self._section_bytes = min(sections, self._unit_bytes)
        self._readers = BoundedThreads(self.read, own, threads, "read")
        return dict(zip(own, self._readers.futures, strict=True))

    def let_go(self) -> None:
        """Keep nothing open, and be in no circle of references, which would keep the targets until a collection."""
        for origin in self._origins.values():
            origin.close()
        del self._readers

    def look(self, unit: Unit) -> HoldfastError | None:
        """See whether a request hangs, and send in others for those who wait for it. Why `unit` never comes, if so."""
        now = time.monotonic()
        with self._lock:
            for late in [one for one in self._requests.values() if now > one.limit]:
                self._give_up(late.unit)
            stuck = {
                thread: one
                for thread, one in self._requests.items()
                if self._origins[one.unit.number].tier in self._hanging
            }
            for thread, one in stuck.items():
                del self._requests[thread]
                self._lost.add(one.unit)
            lost = self._broken[unit.number] if unit in self._lost else None
        self._readers.relieve(len(stuck))
        return lost

    def _give_up(self, unit: Unit) -> None:
        """Send no more requests to the tier of this unit; under the lock."""
        origin = self._origins[unit.number]
        if origin.tier in self._hanging:
            return
        self._hanging.add(origin.tier)
        seconds = origin.seconds_share * self._seconds_max
        error = StoreError(
            f"{self.name(unit)}: nothing has come for {seconds:g} s, {origin.seconds_share:.0%} of "
            f"restore_seconds_max = {self._seconds_max:g} s: the device hangs, and this rank asks it for nothing more; "
            "see what the kernel says of it (dmesg), or take it out of tiers"
        )
        self._broken.update((number, error) for number, of in self._origins.items() if of.tier == origin.tier)

    def hangs(self, unit: Unit) -> bool:
        return self._origins[unit.number].tier in self._hanging

    def stop(self) -> None:
        self._stopped.set()

    def name(self, unit: Unit) -> str:
        origin = self._origins[unit.number]
        return f"{origin.what}: {origin.lying(unit).what}"

    def uses(self) -> dict[str, Use]:
        return {tier: Use(nbytes, end - begun) for tier, (begun, end, nbytes) in self._spans.items()}

    def read(self, unit: Unit) -> None:
        """Read one unit into its targets; once more if it differs, as its bytes may have changed on their way only.

        DamageError: its CRC-32 is wrong, or the origin ends within it. StoreError: store or tier failed.
        """
        origin = self._origins[unit.number]
        lying = origin.lying(unit)
        if self._exchange is not None:
            self._exchange.wait(unit, self._stopped)
        begun = time.monotonic()
        parts = self._windows.parts(unit.extents)
        begins = [part.offset for part in parts]
        request_bytes = min(origin.request_bytes, self._request_bytes)
        for _ in range(_READS_MAX):
            sums: list[Sum] = []
            of_parts: list[list[Sum]] = [[] for _ in parts]
            section = _Section(self._window())
            for run in self._windows.runs(lying.extents, lying.offset, request_bytes, wanted=unit.extents):
                if self._stopped.is_set():
                    return
                if not section.has_room(run.nbytes):
                    self._cross(section)
                    section = _Section(self._window())
                for part_begin, found in self._read(unit, origin, run, sums, section):
                    of_parts[bisect.bisect_right(begins, part_begin) - 1].append(found)
            summed = combine_all(sums)
            if summed == lying.crc32:
                self._cross(section)
                break
        else:
            raise DamageError(
                f"{origin.what}: {lying.what}: CRC-32 expected {lying.crc32:08x}, got {summed:08x}"
            )
        nbytes, end = sum(s.nbytes for s in sums), time.monotonic()
        with self._lock:
            self.bytes_read += nbytes
            first, last, before = self._spans.get(origin.tier, (begun, end, 0))
            self._spans[origin.tier] = (min(first, begun), max(last, end), before + nbytes)
            for part, own in zip(parts, of_parts, strict=True):
                self.sums[part.offset] = Sum(combine_all(own), part.nbytes)

    def _read(
        self, unit: Unit, origin: Origin, run: ReadRun, sums: list[Sum], section: _Section
    ) -> list[tuple[int, Sum]]:
        """Read a run and put its parts in their places; returns the sum of each part with its place in the image.

        All sums of its bytes go to `sums`, in order; what goes to a device is left in the section.
        """
        first, view = section.take(run.nbytes)
        address = section.window.address + first
        me = threading.get_ident()
        limit = time.monotonic() + origin.seconds_share * self._seconds_max
        request = _Request(unit, limit)
        with self._lock:
            if unit.number in self._broken:
                raise self._broken[unit.number]
            self._requests[me] = request
        try:
            origin.read_into(run.offset, view)
        except StoreError as error:
            if unit.number != STORE:
                self._broken.setdefault(unit.number, error)
            raise
        finally:
            with self._lock:
                late = self._requests.pop(me, None) is None
        if late:  # given up while it hung: the targets may hold other bytes by now
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
            target.put(part.inside, address + begin, view[begin:position])
            section.parts += target.parts(part.inside, first + begin, part.nbytes)
            if self._exchange is not None:
                self._exchange.keep(unit, part, address + begin, view[begin:position])
        if position < run.nbytes:
            sums.append(Sum.of(view[position:]))
        return found

    def _cross(self, section: _Section) -> None:
        if self._crossing is not None and isinstance(section.window, SectionWindow):
            self._crossing.send(section.window, section.parts)

    def _window(self) -> ReadWindow | SectionWindow:
        """This thread's window; of those through which bytes go to a device the next one."""
        if self._crossing is not None:
            return self._crossing.window(self._section_bytes)
        window: ReadWindow | None = getattr(self._local, "window", None)
        if window is None:
            window = self._local.window = ReadWindow.of_size(self._request_bytes)
        return window


class _Section:
    """The bytes that a reader has put into a window since the last transfer, and those of them that go to a device."""

    def __init__(self, window: ReadWindow | SectionWindow) -> None:
        self.window = window
        self.parts: list[SectionPart] = []
        self._end = 0

    def has_room(self, nbytes: int) -> bool:
        return self._end + nbytes <= len(self.window.memory)

    def take(self, nbytes: int) -> tuple[int, memoryview]:
        """The next bytes of the window, and where they begin."""
        begin, self._end = self._end, self._end + nbytes
        return begin, self.window.memory[begin : self._end]
