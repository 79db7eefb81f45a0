"""Deliberate bugs in the slot file and its core: the simulated device must reveal each of them (see mutations.py)."""

from __future__ import annotations

from tests.simulation.mutations import Mutation

__all__ = ["TIER_MUTATIONS"]

_FILE, _WRITER = "trainer_side.tiers.slot_file", "trainer_side.tiers.slot_writer"
_FORMAT, _SLOTS = "trainer_side.tiers.slot_format", "trainer_side.tiers.file_slots"


def _one(name: str, bug: str, module: str, old: str, new: str) -> Mutation:
    return Mutation(name, bug, ((module, old, new),))


TIER_MUTATIONS = {
    mutation.name: mutation
    for mutation in (
        _one(
            "committed_before_flushed",
            "the record names a slice before its bytes are durable",
            _WRITER,
            "        slots.file.flush()\n        reach(Point.SLOT_FLUSHED)\n",
            "        reach(Point.SLOT_FLUSHED)\n",
        ),
        _one(
            "same_sector_twice",
            "a commit writes over the sector that counts",
            _FILE,
            "target = 1 - self._current\n",
            "target = self._current\n",
        ),
        _one(
            "overwritten_while_sealed",
            "a slot is written to while the record names it",
            _WRITER,
            "            if self.file.may_be_sealed(slot):\n",
            "            if False:\n",
        ),
        _one(
            "record_not_flushed",
            "a commit is over before it is durable",
            _FILE,
            "        reach(Point.SLOT_RECORDED)\n        self.flush()\n",
            "        reach(Point.SLOT_RECORDED)\n",
        ),
        _one(
            "torn_sector_believed",
            "the CRC of a commit sector is not looked at",
            _FORMAT,
            "page[: len(_SECTOR_MAGIC)] != _SECTOR_MAGIC or not _is_whole(page):",
            "page[: len(_SECTOR_MAGIC)] != _SECTOR_MAGIC:",
        ),
        _one(
            "older_sector_counts",
            "of two whole sectors the older one is taken",
            _FILE,
            "return max(whole, key=",
            "return min(whole, key=",
        ),
        _one(
            "sequence_stands_still",
            "a commit has the number of the one before",
            _FILE,
            "self._sequence += 1\n",
            "self._sequence += 0\n",
        ),
        _one(
            "failed_flush_forgotten",
            "a slice is sealed though a flush has failed while it was written",
            _WRITER,
            "if slots.file.failed_flushes != self._failed_flushes:",
            "if False:",
        ),
        _one(
            "doubtful_record_forgotten",
            "a commit whose flush failed is taken not to count",
            _FILE,
            "for table in (self.committed, *self._uncertain_tables))",
            "for table in (self.committed,))",
        ),
        _one(
            "found_record_not_flushed",
            "what a killed process wrote last is built upon, flushed or not",
            _FILE,
            "        self._write_page(SECTOR_OFFSETS[current], sector.to_bytes())\n        self.flush()\n",
            "",
        ),
        Mutation(
            "proof_of_the_slot",
            "the proof of a slice stays when its slot is used again, and counts for the next one",
            (
                (
                    _WRITER,
                    "                self._proof_path(slot).unlink(missing_ok=True)\n",
                    "                pass\n",
                ),
                (
                    "trainer_side.tiers.slot_proof",
                    "return record.digests[0] if (record.key, record.of_slice) == (key, names) else None",
                    "return record.digests[0]",
                ),
            ),
        ),
        _one(
            "complete_not_noted",
            "that a step is complete is not in the record",
            _WRITER,
            "        if news:\n",
            "        if False:\n",
        ),
        _one(
            "pending_recycled",
            "a slice that may yet become complete is overwritten",
            _SLOTS,
            "        return pending | (",
            "        return set() | (",
        ),
        _one(
            "complete_recycled",
            "the newest complete slice is overwritten",
            _SLOTS,
            "{newest[1]} if newest is not None else set()",
            "set()",
        ),
        _one(
            "damaged_kept",
            "a complete slice that restore found damaged is protected, and the good one before it overwritten",
            _SLOTS,
            "and slot.order == order and (slot.found or not slot.complete):",
            "and slot.order == order and not slot.complete:",
        ),
        _one(
            "void_protected",
            "what was given up is protected like what is wanted",
            _SLOTS,
            "if slot.state is _State.SEALED and not slot.void\n        ]\n        complete =",
            "if slot.state is _State.SEALED\n        ]\n        complete =",
        ),
        _one(
            "found_kept_for_ever",
            "what was found is kept, complete or not: no slot is ever free",
            _SLOTS,
            "if not self._slots[number].found and not",
            "if not",
        ),
    )
}
