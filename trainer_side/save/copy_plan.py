"""The plan of a copy: sources, places, order and sizes of the batches. Pure: addresses and sizes, no bytes.

    layout.sends(rank):   chunk 0: ─piece─ ─piece─   chunk 1: ─────piece─────   …
    staging area:         │ piece │ piece │pad│ piece        │pad│ …       each frame begins on a page
                          └ frame 0 ──────┘   └ frame 1 ─────┘             (holdfast/image/slices.py)

    route, in the order of the next update:   [layer 1: w m v · layer 2: w] [large piece] [layer 2: m v · layer 3 …] …
                                               └ one batch: small pieces together

A `SlicePlan` is valid as long as the layout, a `Route` as long as no tensor moves and updates keep their order: a save
looks it up once, not once per tensor. The gate and the sender are notified once per batch. Pieces are never joined,
since a zip header lies between two entries of an image.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

from holdfast.image.layout import Layout
from holdfast.image.slices import area_bytes, frames_of
from trainer_side.state.survey import Sources, StorageSource

# Small, so that each layer and each frame is released soon after it is copied.
BATCH_BYTES_MAX = 1 << 20
_BATCH_PIECES_MAX = 256
# Larger for tensors on a device, which copies megabytes in the time that the calls of one batch take.
DEVICE_BATCH_BYTES_MAX = 16 << 20
_DEVICE_BATCH_PIECES_MAX = 4096
_BATCHES_MIN = 8  # so that a small state is released layer by layer, too
_place = attrgetter("data_ptr", "start_bytes")  # of a source; every gated entry lies in a tensor


class CopyPiece(NamedTuple):
    """`nbytes` of an entry, from `entry_offset` on, that this rank copies to `offset` of the area, in `frame`."""

    offset: int
    entry: int
    entry_offset: int
    nbytes: int
    frame: int


@dataclass(frozen=True)
class SlicePlan:
    """One rank's slice of one layout."""

    now: tuple[CopyPiece, ...]  # copied before `save()` returns
    gated: tuple[CopyPiece, ...]  # copied behind the gate
    frames: tuple[int, ...]  # where each begins in the staging area
    nbytes: int
    area_bytes: int  # of the staging area, padding between frames included

    @classmethod
    def of(cls, layout: Layout, rank: int, gated: Sequence[bool]) -> SlicePlan:
        """The slice of `rank`; `gated` says per entry whether it is copied behind the gate."""
        now: list[CopyPiece] = []
        behind: list[CopyPiece] = []
        frames = frames_of(layout, rank)
        for number, frame in enumerate(frames):
            offset = frame.offset
            for part in layout.parts(frame.chunk, rank):
                if part.entry is not None and part.nbytes:
                    piece = CopyPiece(offset, part.entry, part.inside, part.nbytes, number)
                    (behind if gated[part.entry] else now).append(piece)
                offset += part.nbytes
            assert offset == frame.offset + frame.nbytes
        return cls(
            tuple(now),
            tuple(behind),
            tuple(frame.offset for frame in frames),
            sum(frame.nbytes for frame in frames),
            area_bytes(layout, rank),
        )

    def entries_between(self, before: CopyPiece, after: CopyPiece) -> Sequence[int]:
        """Entries of the pieces that lie between two pieces of the slice, in the order of the area."""
        first, last = self._numbers[before.offset], self._numbers[after.offset]
        return [piece.entry for piece in self._ordered[first + 1 : last]] if last - first > 1 else ()

    @cached_property
    def _ordered(self) -> list[CopyPiece]:
        return sorted((*self.now, *self.gated))

    @cached_property
    def _numbers(self) -> dict[int, int]:
        return {piece.offset: number for number, piece in enumerate(self._ordered)}


@dataclass(frozen=True)
class SliceSources:
    """A slice, and where its bytes lie at one save."""

    plan: SlicePlan
    # By entry; None if its bytes are generated, or on another rank.
    sources: Sources

    @cached_property
    def host_entries(self) -> frozenset[int]:
        return frozenset(
            entry
            for entry, source in enumerate(self.sources)
            if source is not None and source.device.type == "cpu"
        )


@dataclass(frozen=True)
class Batch:
    """Pieces that are copied by one call; all of them in host memory, or all on a device."""

    pieces: tuple[CopyPiece, ...]  # in the order in which they are copied
    offsets: tuple[int, ...]  # where each goes in the staging area
    addresses: tuple[int, ...]  # where each comes from
    sizes: tuple[int, ...]  # bytes of each
    nbytes: int
    released_storages: tuple[int, ...]  # addresses of the storages that no later batch reads
    frames: Mapping[int, int]  # frame → how many of its pieces are in this batch


@dataclass(frozen=True)
class Route:
    """The order of one copy behind the gate."""

    host: tuple[Batch, ...]
    device: tuple[Batch, ...]
    storages: frozenset[int]  # addresses of all storages that are read

    def host_only(self) -> Route:
        """The same route without the batches on a device."""
        read = frozenset(storage for batch in self.host for storage in batch.released_storages)
        return Route(self.host, (), read)


class Router:
    """Makes the route of each save, or reuses the last one. Training or copy thread, never both at once."""

    def __init__(self, plan: SlicePlan) -> None:
        self._pieces = plan.gated
        self._entries = sorted({piece.entry for piece in plan.gated})
        self._places: list[Any] = []
        self._order: dict[int, int] = {}
        self._route: Route | None = None

    def route(
        self, sources: Sources, update_order: Callable[[], Mapping[int, int]], *, order_changed: bool
    ) -> Route:
        """Return the route. `update_order`: Returns the place of each storage, by its address, in the order of updates.
        `order_changed`: Whether that order may differ from the last save's.
        """
        places = [*map(_place, map(sources.__getitem__, self._entries))]
        moved = self._route is None or places != self._places
        if moved or order_changed:
            order = dict(update_order())
            # With one optimizer per layer, stepping in backward, the order often comes out the same.
            if self._route is None or moved or order != self._order:
                self._route = _route(self._pieces, sources, order)
            self._places, self._order = places, order
        assert self._route is not None
        return self._route


def batches(
    pieces: Iterable[CopyPiece],
    sources: Sources,
    *,
    pieces_max: int = _BATCH_PIECES_MAX,
    bytes_max: int = BATCH_BYTES_MAX,
) -> tuple[Batch, ...]:
    """Cut pieces, all in host memory or all on a device, into batches of at most `bytes_max`, or of a single piece."""
    groups: list[list[CopyPiece]] = []
    nbytes = 0
    for piece in pieces:
        if not groups or len(groups[-1]) >= pieces_max or nbytes + piece.nbytes > bytes_max:
            groups.append([])
            nbytes = 0
        groups[-1].append(piece)
        nbytes += piece.nbytes
    return tuple(batches_of(groups, sources))


def batches_of(groups: Sequence[Sequence[CopyPiece]], sources: Sources) -> Iterator[Batch]:
    reads_left = Counter(_storage(sources, piece) for group in groups for piece in group)
    for group in groups:
        released = []
        for piece in group:
            storage = _storage(sources, piece)
            reads_left[storage] -= 1
            if not reads_left[storage]:
                released.append(storage)
        yield Batch(
            pieces=tuple(group),
            offsets=tuple(piece.offset for piece in group),
            addresses=tuple(address_of(sources, piece) for piece in group),
            sizes=tuple(piece.nbytes for piece in group),
            nbytes=sum(piece.nbytes for piece in group),
            released_storages=tuple(released),
            frames=Counter(piece.frame for piece in group),
        )


def _route(pieces: Sequence[CopyPiece], sources: Sources, order: Mapping[int, int]) -> Route:
    last = len(order)
    ordered = sorted(pieces, key=lambda piece: order.get(_storage(sources, piece), last))
    host = [piece for piece in ordered if source_of(sources, piece).device.type == "cpu"]
    device = [piece for piece in ordered if source_of(sources, piece).device.type != "cpu"]
    most_host = _pieces_max(len(host), _BATCH_PIECES_MAX)
    most_device = _pieces_max(len(device), _DEVICE_BATCH_PIECES_MAX)
    return Route(
        host=batches(host, sources, pieces_max=most_host),
        device=batches(device, sources, pieces_max=most_device, bytes_max=DEVICE_BATCH_BYTES_MAX),
        storages=frozenset(_storage(sources, piece) for piece in ordered),
    )


def _pieces_max(pieces: int, most: int) -> int:
    return min(most, max(1, pieces // _BATCHES_MIN))


def source_of(sources: Sources, piece: CopyPiece) -> StorageSource:
    source = sources[piece.entry]
    assert source is not None, "what is gated, or on a device, lies in a tensor"
    return source


def address_of(sources: Sources, piece: CopyPiece) -> int:
    return source_of(sources, piece).data_ptr + piece.entry_offset


def _storage(sources: Sources, piece: CopyPiece) -> int:
    """Address of the piece's whole storage, by which the gate knows it."""
    source = source_of(sources, piece)
    return source.data_ptr - source.start_bytes
