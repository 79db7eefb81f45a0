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

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from trainer_side.outline import Facts, Outline
from trainer_side.pickling import REFUSED, Pickling, Ready
from trainer_side.survey import Source, Survey

__all__ = ["Recall", "Seen"]


class Seen(NamedTuple):
    """The tensors of a tree that was recognised, and their storages; in the order of the outline."""

    tensors: list[torch.Tensor]
    storages: list[torch.UntypedStorage]


class _Place(NamedTuple):
    """Where the bytes of one entry are."""

    entry: int
    tensor: int  # one whose storage it is
    start_bytes: int
    nbytes: int
    device: torch.device


class Recall:
    """Of one tree. Training thread only. Keeps no tensor and no storage alive."""

    def __init__(self, outline: Outline, facts: Facts, places: list[_Place], ready: Ready | None) -> None:
        self._outline, self._facts, self._places, self._ready = outline, facts, places, ready

    @classmethod
    def of(
        cls,
        tree: Mapping[str, Any],
        found: Survey,
        storage_entries: Sequence[int],
        *,
        leave_out: Collection[int],
        pickled: tuple[Pickling, bytes] | None,
    ) -> Recall | None:
        """Keep what was found in `tree`; None if it is of a kind that must be looked at in full each time.

        Args:
            tree: The tree.
            found: Its survey.
            storage_entries: Storage number to entry of the layout.
            leave_out: Entries that are not copied from a storage.
            pickled: How it was pickled, and the pickle; None if it was not, which is so on ranks other than 0.
        """
        outlined = Outline.of(tree)
        if outlined is None:
            return None
        outline, tensors = outlined
        if len(tensors) != len(found.slots) or not all(id(tensor) in found.paths for tensor in tensors):
            return None
        facts = Facts.of(tensors)
        if facts is None:
            return None
        places: dict[int, _Place] = {}
        for index, tensor in enumerate(tensors):
            number = found.number(tensor)
            assert number is not None, "all tensors were surveyed"
            entry, part = storage_entries[number], found.parts[number]
            if entry not in leave_out:
                place = _Place(entry, index, part.start_bytes, part.nbytes, part.storage.device)
                places.setdefault(entry, place)
        ready = None if pickled is None else pickled[0].ready(tensors)
        recall = cls(outline, facts, [*places.values()], ready)
        return recall if pickled is None or recall._proves(tree, tensors, *pickled) else None

    def look(self, tree: Mapping[str, Any]) -> Seen | None:
        """The tensors of `tree`, if but for values it is the tree that this was made of."""
        tensors = self._outline.tensors(tree)
        storages = None if tensors is None else self._facts.storages(tensors)
        return None if tensors is None or storages is None else Seen(tensors, storages)

    def sources(self, seen: Seen, entries: int) -> list[Source | None]:
        """Per entry of the layout, where its bytes lie now."""
        sources: list[Source | None] = [None] * entries
        storages = seen.storages
        # Not `Source(…)`: that runs Python code for each.
        new = tuple.__new__
        for entry, tensor, start_bytes, nbytes, device in self._places:
            storage = storages[tensor]
            address = storage.data_ptr() + start_bytes if nbytes else 0
            sources[entry] = new(Source, (entry, storage, start_bytes, nbytes, address, device))
        return sources

    def pickle(self, tree: Mapping[str, Any], seen: Seen) -> tuple[bytes, set[Any]] | None:
        """The bytes that `Pickling.head` would give, and the classes of values; None if that must say what is wrong."""
        if self._ready is None:
            return None
        try:
            return self._ready.pickle(tree, seen.tensors)
        except REFUSED:
            return None

    def _proves(self, tree: Any, tensors: list[torch.Tensor], job: Pickling, expected: bytes) -> bool:
        again = self.pickle(tree, Seen(tensors, []))
        return again is not None and again[0] == expected and again[1] <= job.kinds
