"""Recall: what one capture in full has found, so that the next one has little to do where only values have changed.

    capture in full ─► survey, pickle ─► Recall.of: outline, facts, places of the storages, how each tensor is pickled
    capture         ─► Recall.look(tree): the same outline, the same facts?
                        ├─ yes: sources from where the storages lie now; pickle without asking torch about any tensor
                        └─ no:  None, and the capture is done in full

Nothing is taken for granted: plain values are pickled anew each time, and each tensor is looked at each time. What the
pickle of a tensor depends on is among its facts. A recall proves itself before it is used: pickled with it, the tree
that it was made of must give the same bytes as torch gave.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from itertools import repeat
from operator import add
from typing import Any, NamedTuple

import torch

from trainer_side.state.arriving import settle
from trainer_side.state.outline import Outline, TensorFacts, Walked
from trainer_side.state.pickling import REFUSED, Pickling, Ready, StandIn
from trainer_side.state.snapshot import Constants, Snapshot, snapshot
from trainer_side.state.survey import StorageSource, Survey


class RecognisedTree(NamedTuple):
    """The contents of a tree that was recognised, and the storages of all its tensors but stand-ins, in its order."""

    walked: Walked
    storages: list[torch.UntypedStorage]


class Last(NamedTuple):
    """The last pickle that was made of a snapshot: its size, and `Snapshot.text_length`."""

    pickle_bytes: int
    text_length: int


class _Place(NamedTuple):
    """The place of the bytes of one entry."""

    entry: int
    storage: int  # among those of `RecognisedTree`
    start_bytes: int
    nbytes: int
    device: torch.device


class Recall:
    """The recall of one tree. Training thread, except `pickle_snapshot`. It keeps no tensor and no storage alive.

    Attributes:
        last: See `Last`. Any thread.
        holds: False: it recognises nothing any more. Any thread.
        entries: Of each tensor of `RecognisedTree.walked`, the entry of the layout.
    """

    def __init__(
        self,
        outline: Outline,
        facts: TensorFacts,
        places: list[_Place],
        ready: Ready | None,
        entries: tuple[int, ...],
        asked: tuple[int, ...],
    ) -> None:
        self._outline, self._facts, self._ready = outline, facts, ready
        self._columns = tuple(zip(*places, strict=True)) or ((),) * len(_Place._fields)
        self._empty = [number for number, place in enumerate(places) if not place.nbytes]
        self._asked = asked  # places of all tensors but stand-ins
        self.entries = entries
        self._constants: Constants | None = None
        self.last = Last(0, 0)
        self.holds = True

    @classmethod
    def of(
        cls,
        tree: Mapping[str, Any],
        found: Survey,
        storage_entries: Sequence[int],
        *,
        leave_out: Collection[int],
        stand_ins: Collection[int],
        pickled: tuple[Pickling, bytes] | None,
    ) -> Recall | None:
        """Keep what was found in `tree`; None if it is of a kind that must be looked at in full each time.

        Args:
            tree: The tree.
            found: Its survey.
            storage_entries: Storage number to entry of the layout.
            leave_out: Entries that are not copied from a storage.
            stand_ins: Entries of tensors that whoever made the tree knows to be the same ones: they are copied from
                elsewhere, and nothing is asked about them again.
            pickled: How it was pickled, and the pickle; None if it was not, which is so on ranks other than 0.
        """
        outlined = Outline.of(tree)
        if outlined is None:
            return None
        outline, walked = outlined
        tensors = walked.tensors
        if len(tensors) != len(found.slots) or not all(id(tensor) in found.paths for tensor in tensors):
            return None
        places: dict[int, _Place] = {}
        entries: list[int] = []
        asked: list[int] = []
        for index, tensor in enumerate(tensors):
            number = found.number(tensor)
            assert number is not None, "all tensors were surveyed"
            entry, part = storage_entries[number], found.parts[number]
            entries.append(entry)
            if entry in stand_ins:
                continue
            if entry not in leave_out:
                place = _Place(entry, len(asked), part.start_bytes, part.nbytes, part.storage.device)
                places.setdefault(entry, place)
            asked.append(index)
        facts = TensorFacts.of([*map(tensors.__getitem__, asked)])
        if facts is None:
            return None
        ready = None if pickled is None else pickled[0].ready(tensors)
        recall = cls(outline, facts, [*places.values()], ready, tuple(entries), tuple(asked))
        return recall if pickled is None or recall._proves(tree, walked, *pickled) else None

    def look(self, tree: Mapping[str, Any]) -> RecognisedTree | None:
        """The tensors of `tree`, if but for values it is the tree that this was made of."""
        walked = self._outline.walk(tree) if self.holds else None
        if walked is None:
            return None
        storages = self._facts.storages([*map(walked.tensors.__getitem__, self._asked)])
        return None if storages is None else RecognisedTree(walked, storages)

    def sources(self, seen: RecognisedTree, entries: int) -> list[StorageSource | None]:
        """Per entry of the layout, where its bytes lie now."""
        sources: list[StorageSource | None] = [None] * entries
        of_entry, numbers, starts, sizes, devices = self._columns
        storages = [*map(seen.storages.__getitem__, numbers)]
        addresses = [*map(add, map(torch.UntypedStorage.data_ptr, storages), starts)]
        for place in self._empty:
            addresses[place] = 0
        # Not `StorageSource(…)`: that runs Python code for each.
        made = zip(of_entry, storages, starts, sizes, addresses, devices, strict=True)
        for entry, source in zip(of_entry, map(tuple.__new__, repeat(StorageSource), made), strict=True):
            sources[entry] = source
        return sources

    def pickle(self, tree: Mapping[str, Any], walked: Walked) -> tuple[bytes, set[Any]] | None:
        """The bytes that `Pickling.head` would give, and the classes of values; None if that must say what is wrong."""
        settle(tree)
        return None if self._ready is None else self._pickled(tree, self._ready.stand_ins(walked.tensors))

    def snapshot(self, tree: Mapping[str, Any], walked: Walked) -> Snapshot | None:
        """The tree as it is now; None if there may be more to it than a copy of its containers keeps."""
        if self._ready is None or self._constants is None or not walked.is_exact:
            return None
        known: dict[int, Any] = {
            **self._ready.stand_ins(walked.tensors),
            **self._constants.known(walked.containers),
        }
        return snapshot(tree, known)

    def pickle_snapshot(self, taken: Snapshot) -> tuple[bytes, set[Any]] | None:
        """As `pickle`, of a tree as it was. Any thread."""
        settle(taken.tree)  # a copy, so nobody else's
        return self._pickled(taken.tree, {})

    def _pickled(self, tree: Any, stand_ins: Mapping[int, StandIn]) -> tuple[bytes, set[Any]] | None:
        assert self._ready is not None
        try:
            return self._ready.pickle(tree, stand_ins)
        except REFUSED:
            return None

    def _proves(self, tree: Mapping[str, Any], walked: Walked, job: Pickling, expected: bytes) -> bool:
        """Whether it pickles the tree as torch did. Snapshots are made only if they are pickled like that, too."""

        def same(again: tuple[bytes, set[Any]] | None) -> bool:
            return again is not None and again[0] == expected and again[1] <= job.kinds

        if not same(self.pickle(tree, walked)):
            return False
        assert self._ready is not None
        if self._outline.is_plain:
            with contextlib.suppress(ValueError):
                self._constants = Constants(walked.containers, self._ready.stand_ins(walked.tensors))
        taken = self.snapshot(tree, walked)
        if taken is not None and same(self.pickle_snapshot(taken)):
            self.last = Last(len(expected), taken.text_length)
        else:
            self._constants = None
        return True
