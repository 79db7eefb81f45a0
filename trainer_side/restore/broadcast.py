"""Sends bytes from the rank that read them to all others, each of which keeps its own parts.

    reader   reads a unit ─► its own parts, and a window ─┐  share
    others                                    a window ◄──┘ ─► CRC-32, to be compared ─► their own parts

No rank has memory for a whole split tensor, so shared bytes go from window to window. A window holds the shared bytes
of one unit back to back, and is sent as one message. It is reused when its bytes have arrived everywhere
(`Peers.finish`). Bytes for a device also arrive in windows.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from trainer_side.ranks.peers import Peers
from trainer_side.restore.device_sections import DeviceSections, SectionPart, SectionWindow, pad
from trainer_side.restore.exchange import Exchange
from trainer_side.restore.read_plan import Unit
from trainer_side.restore.structure import ImageMap
from trainer_side.restore.targets import ChunkWindows, EntryPart, EntrySink, EntryTarget, ReadWindow, Sum

_BATCH = 2  # units in flight at once
_AHEAD = _BATCH + 2  # units that this rank has read but not yet sent


_Key = tuple[int, int, int, int]


def _key(unit: Unit) -> _Key:
    """Hashable id of a read unit; leaves out its extents, which may be thousands."""
    return unit.reader, unit.number, unit.chunk, unit.frame


class _Packed(NamedTuple):
    """The parts of a unit that go through a window, and where each begins in it."""

    begins: list[int]  # ascending, by offset in the image
    parts: list[EntryPart]
    positions: list[int]
    nbytes: int

    @classmethod
    def of(cls, parts: list[EntryPart]) -> _Packed:
        *positions, nbytes = itertools.accumulate((part.nbytes for part in parts), initial=0)
        return cls([part.offset for part in parts], parts, positions, nbytes)

    def position(self, offset: int) -> int:
        """Return where in the window a byte of the image is."""
        number = bisect.bisect_right(self.begins, offset) - 1
        return self.positions[number] + offset - self.begins[number]


class Broadcast(Exchange):
    """Sends every unit to all ranks: in place if the bytes lie in host memory, through windows otherwise.

    Entries that are shared in place have an `EntryTarget`; all others go through windows. Checksums are compared when
    all bytes have arrived (`check_received`). `own`: The units that this rank reads, in order. `device_sections`:
    Transfers to the device of some targets; None: this rank has none there.
    """

    def __init__(
        self,
        image: ImageMap,
        windows: ChunkWindows,
        targets: Mapping[int, EntrySink],
        own: Iterable[Unit],
        device_sections: DeviceSections | None,
    ) -> None:
        super().__init__(_AHEAD)
        self._windows, self._targets, self._device_sections = windows, targets, device_sections
        self._chunk_bytes = min(image.chunk_bytes, image.image_bytes)
        self._place_bytes = pad(self._chunk_bytes)
        self._send_indexes: dict[_Key, int] = {}
        if any(not isinstance(target, EntryTarget) for target in targets.values()):
            through_window = (unit for unit in own if any(map(self.uses_window, windows.parts(unit.extents))))
            self._send_indexes = {_key(unit): turn for turn, unit in enumerate(through_window)}
        self._packed: dict[_Key, _Packed] = {}  # of units that are being read or sent
        self._send_windows: dict[int, ReadWindow] = {}
        self._receive_windows: dict[int, ReadWindow] = {}
        self._section: SectionWindow | None = None  # receives in flight, if some are for a device
        self._batch: list[Unit] = []

    def uses_window(self, part: EntryPart) -> bool:
        """Whether a part goes through a window."""
        return not isinstance(self._targets[part.entry], EntryTarget)

    def _send_index(self, unit: Unit) -> int | None:
        return self._send_indexes.get(_key(unit))

    def pack(self, unit: Unit, part: EntryPart, address: int, view: memoryview) -> None:
        if self.uses_window(part):
            window, packed = self._window(unit)
            ctypes.memmove(window.address + packed.position(part.offset), address, view.nbytes)

    def share(self, unit: Unit, peers: Peers) -> None:
        pieces = []
        parts = self._windows.parts(unit.extents)
        for part in parts:
            target = self._targets[part.entry]
            if isinstance(target, EntryTarget):
                pieces.append((target.address + part.entry_offset, part.nbytes))
        if len(pieces) < len(parts):
            self._batch.append(unit)
            window, packed = self._window(unit)
            pieces.append((window.address, packed.nbytes))
        peers.share(pieces, unit.reader)

    @property
    def is_full(self) -> bool:
        return len(self._batch) >= _BATCH

    def process_received(self) -> None:
        sent = 0
        section_parts: list[SectionPart] = []
        for place, unit in enumerate(self._batch):
            with self._changed:
                packed = self._packed.pop(_key(unit))
            if _key(unit) in self._send_indexes:
                sent += 1
                continue
            window, first = self._receive_windows[place], place * self._place_bytes
            for part, begin in zip(packed.parts, packed.positions, strict=True):
                view = window.memory[begin : begin + part.nbytes]
                self.received[part.offset] = Sum.of(view)
                target = self._targets[part.entry]
                target.put(part.entry_offset, window.address + begin, view)
                section_parts += target.parts(part.entry_offset, first + begin, part.nbytes)
        self._batch.clear()
        if self._section is not None and self._device_sections is not None:
            self._device_sections.send(self._section, section_parts)
            self._section = None  # the other window receives next, while this one is transferred
            self._receive_windows.clear()
        self._count_sent(sent)

    def _window(self, unit: Unit) -> tuple[ReadWindow, _Packed]:
        turn = self._send_index(unit)
        windows = self._receive_windows if turn is None else self._send_windows
        place = len(self._batch) - 1 if turn is None else turn % _AHEAD
        with self._changed:
            if place not in windows:
                windows[place] = self._new_window(place if turn is None else None)
            if _key(unit) not in self._packed:
                parts = self._windows.parts(unit.extents)
                self._packed[_key(unit)] = _Packed.of([part for part in parts if self.uses_window(part)])
            return windows[place], self._packed[_key(unit)]

    def _new_window(self, place: int | None) -> ReadWindow:
        """Return memory to receive the unit at `place` of a batch, or to send a unit."""
        if place is None or self._device_sections is None:
            return ReadWindow.of_size(self._chunk_bytes)
        if self._section is None:
            self._section = self._device_sections.window(_BATCH * self._place_bytes)
        begin = place * self._place_bytes
        return ReadWindow(
            self._section.address + begin, self._section.memory[begin : begin + self._chunk_bytes]
        )
