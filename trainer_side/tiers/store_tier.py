"""The store as a tier, for ranks without a stager: each rank writes its slice as an object beside the checkpoints.

    begin ─► first write: an upload ─► parts, as frames come ─► layout ─► publish ─► seal        the slice exists
    begin(newer) ─► the oldest one's seal, then its slice, if the slots are taken and a newer step is complete
    all ranks sealed ─► the next writer of the run makes the portable file of it (holdfast/checkpoints/assembly.py)

No two ranks write the same object and no name is written twice, so the ranks need no agreement and no fencing: names
carry attempt and step. The store retries its errors within its own bounds; after that the slice does not exist. A later
attempt removes the objects of a killed rank.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from holdfast.checkpoints.slice_sets import (
    SliceName,
    SliceSet,
    find_sets,
    layout_name,
    read_doubts_of,
    read_layout,
    read_seal,
    write_doubt,
)
from holdfast.errors import ConfigError, DamageError, StoreError, StoreMissing
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.layout import Layout
from holdfast.image.slices import SliceSeal, area_bytes
from holdfast.ring.doubts import DoubtedSteps, doubt_about
from holdfast.store import parts_at_once
from holdfast.store.base import Store
from trainer_side.tiers.store_writer import SliceShelf, StoreSliceWriter
from trainer_side.tiers.tier import Kept, Nearness

_log = logging.getLogger("holdfast.trainer")
_READERS = 8  # each seal is one small request


class StoreTier:
    """The run's store as a tier of one rank. `begin`, `complete`, `void` and `kept` may come from different threads.

    Args:
        store: The run, with retries, as `open_store` gives it.
        rank: This rank. Slices that older jobs left of rank `r` belong to rank `r` modulo the number of ranks now.
        slots: Slices of this rank that may be in the store, at least 2 (else ConfigError).
        writers: Threads that should call `write` at once; None: as suits the store.
        closes: Whether `close` closes the store.
    """

    nearness = Nearness.STORE
    name = "store"

    def __init__(
        self,
        store: Store,
        *,
        run: str,
        rank: int = 0,
        slots: int = 2,
        writers: int | None = None,
        closes: bool = False,
    ) -> None:
        if slots < 2:
            raise ConfigError(
                f"tier store: {slots} slots; expected at least 2: one is kept while the next is written"
            )
        self._store, self._run, self._rank = store, run, rank
        self.writers = writers or parts_at_once(store.url)
        self._closes = closes
        self._shelf = SliceShelf(store, slots)
        self._layout: Layout | None = None
        self._checked = False

    @property
    def how(self) -> str:
        return f"objects in {self._store.url}/slices, {self.writers} writers"

    def prepare(self, layout: Layout, rank: int) -> None:
        """Check that the store takes writes, and find slices of earlier jobs. Removes nothing.

        This does not wait for a store that is slow or unavailable: `write` does that. Slices of earlier jobs then stay
        until the next flusher removes them. Other errors of the store are raised.
        """
        self._layout, self._rank = layout, rank
        try:
            if not self._checked:
                self._store.check(write=True)
                self._checked = True
            self._shelf.note_found(rank, layout.ranks)
        except StoreError as error:
            if not error.retriable:
                raise
            _log.warning(
                "the store may not take this rank's slices yet; the first slice is tried all the same: %s",
                error,
            )

    def memories(self) -> Sequence[memoryview]:
        return ()

    def begin(self, attempt: int, step: int) -> StoreSliceWriter | None:
        # Without a request: the oldest slice that need not stay goes when the first byte is written.
        name = SliceName(attempt, step, self._rank, self._layout.ranks if self._layout else 1)
        if self._layout is None or not self._shelf.take(name.order):
            return None
        return StoreSliceWriter(self._store, self._shelf, run=self._run, name=name, layout=self._layout)

    def complete(self, attempt: int, step: int) -> None:
        self._shelf.complete(CheckpointId(attempt, step))

    def void(self, attempt: int, step: int) -> None:
        self._shelf.void(CheckpointId(attempt, step))

    def doubt(self, steps: DoubtedSteps) -> None:
        write_doubt(self._store, steps)

    def kept(self) -> list[Kept]:
        """All sealed slices in the store, newest first. An unusable slice is left out, and the log names it."""
        layouts: dict[str, Layout] = {}
        layouts_lock = threading.Lock()

        def layout_of(seal: SliceSeal) -> Layout:
            name = layout_name(seal.attempt, seal.layout_digest)
            with layouts_lock:  # all slices of a step share one: it is read once
                if name not in layouts:
                    layouts[name] = read_layout(self._store, seal.attempt, seal.layout_digest)
                return layouts[name]

        def look(found: SliceSet, name: SliceName) -> Kept | None:
            try:
                return self._kept(found, name, layout_of)
            except StoreMissing as error:
                _log.info("%s: was removed while this rank looked at it: %s", name.slice, error)
            except DamageError as error:
                _log.warning("a slice in the store is left out: %s", error)
            return None

        objects = self._store.list()
        sets, doubts = find_sets(objects), read_doubts_of(self._store, objects)
        names = [(found, found.name(rank)) for found in sets for rank in sorted(found.seals)]
        with ThreadPoolExecutor(_READERS, thread_name_prefix="kept") as readers:
            looked = list(readers.map(lambda pair: look(*pair), names))
        return [
            replace(kept, doubt=doubt_about(doubts, CheckpointId(*kept.seal.order)))
            for kept in looked
            if kept is not None
        ]

    def read_into(self, kept: Kept, offset: int, view: memoryview) -> None:
        """Fill `view` from `offset` of the slice on, by one ranged read. Any thread.

        StoreMissing: the slice became a file that the catalog has, or a newer step is complete.
        """
        seal = kept.seal
        self._store.read_into(SliceName(seal.attempt, seal.step, seal.rank, seal.ranks).slice, offset, view)

    def close(self) -> None:
        if self._closes:
            self._store.close()

    def _kept(self, found: SliceSet, name: SliceName, layout_of: Any) -> Kept:
        seal = read_seal(self._store, name)
        place = f"{self._store.url}/{name.slice}"
        if seal.run != self._run:
            raise DamageError(
                f"{place}: belongs to run {seal.run!r}, expected {self._run!r}; the slice is left alone"
            )
        layout: Layout = layout_of(seal)
        seal.check_layout(layout, source=f"{self._store.url}/{name.seal}")
        expected, got = area_bytes(layout, name.rank), found.slices.get(name.rank, 0)
        if got != expected:
            raise DamageError(f"{place}: has {got} bytes, the seal says {expected}")
        return Kept(seal, layout, place)
