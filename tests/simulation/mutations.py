"""Deliberate bugs: each changes a few words of the product's source at import, and the simulation must detect it.

    python -m tests.simulation --mutation credit_twice --first 0 --count 500

A mutation whose words are no longer in the source is an error: update it, do not skip it.
"""

# ruff: noqa: E501, ISC004 - the strings are pieces of source

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MUTATIONS", "Mutation", "apply", "install"]


@dataclass(frozen=True)
class Mutation:
    """One bug. `edits`: (module, old words, new words); `seeds_max`: a limit of seeds until it is detected.

    `first_seed`: where to begin, for a bug that few seeds show, to skip the seeds that do not.
    """

    name: str
    bug: str
    edits: tuple[tuple[str, str, str], ...]
    seeds_max: int = 400
    first_seed: int = 0


def _one(
    name: str, bug: str, module: str, old: str, new: str, seeds_max: int = 400, first_seed: int = 0
) -> Mutation:
    return Mutation(name, bug, ((module, old, new),), seeds_max, first_seed)


MUTATIONS = {
    mutation.name: mutation
    for mutation in (
        # -- the stager's side
        _one(
            "full_before_payload",
            "a chunk is FULL as soon as SENT has come, payload or not",
            "stager.session.ring_slots",
            "if not credit.received or credit.crc is None:",
            "if credit.crc is None:",
        ),
        _one(
            "full_before_other_senders",
            "a chunk is FULL when the first of its senders is in",
            "stager.session.ring_slots",
            "if len(checkpoint.complete[chunk]) < len(layout.senders(chunk)):",
            "if not checkpoint.complete[chunk]:",
        ),
        _one(
            "credit_twice",
            "a slot that was granted stays in the list of free ones",
            "stager.session.ring_slots",
            "slot = self.free.popleft()",
            "slot = self.free[0]",
        ),
        _one(
            "ended_slot_reused",
            "the slots of an ended checkpoint are free at once, with credits still out",
            "stager.session.ring_slots",
            "        if chunk in checkpoint.unsettled:\n            return []\n        slot",
            "        slot",
        ),
        _one(
            "staged_before_last_chunk",
            "staged is said when all ranks are done, whatever has arrived",
            "stager.session.session",
            "        if checkpoint.frames_missing:\n            return\n",
            "",
        ),
        _one(
            "freed_slot_forgotten",
            "a slot that the flusher freed never serves again",
            "stager.session.ring_slots",
            "            self.free.append(slot)\n",
            "",
        ),
        Mutation(
            "silence_forgotten",
            "nobody looks at the deadlines, nor at who is silent",
            (
                ("stager.session.session", "            if overdue_text:\n", "            if False:\n"),
                (
                    "stager.session.session",
                    '        self._continue_without(event.rank, f"{event.name} has been silent for {event.silent_seconds:.0f} s")\n',
                    "        pass\n",
                ),
            ),
            3000,
        ),
        _one(
            "remains_under_another_name",
            "a slot that is filled again, and given up, still has the CRCs of what it held",
            "holdfast.ring.journal",
            "        self._memory[base + _CONTENT_OFFSET : base + _CONTENT_OFFSET + _CONTENT.size] = bytes(_CONTENT.size)\n",
            "",
            3000,
            first_seed=280,
        ),
        _one(
            "recalled_unseen",
            "bytes are given from the slot where a chunk once was, whatever is in it now",
            "stager.fetches",
            "if record is None or (record.attempt, record.step, record.chunk) != chunk_key or end > record.nbytes:",
            "if record is None or end > record.nbytes:",
            3000,
        ),
        _one(
            "read_unseen",
            "a rank of the stager's machine reads the slot where a chunk once was, whatever is in it now",
            "holdfast.ring.near_ring",
            " or (record.attempt, record.step, record.chunk) != wanted_chunk:\n",
            ":\n",
            3000,
        ),
        _one(
            "read_without_second_look",
            "a rank of the stager's machine does not look whether the slot was filled again while it read",
            "holdfast.ring.near_ring",
            "        return self._record(slot) == record\n",
            "        return True\n",
            900,
            first_seed=600,
        ),
        # -- a store that accepts nothing
        _one(
            "staged_waits_for_began",
            "what lies whole in the ring is staged only when the flusher has begun to write it",
            "stager.session.session",
            "if checkpoint.phase not in (Phase.PREPARED, Phase.RECEIVING):",
            "if checkpoint.phase is not Phase.RECEIVING:",
        ),
        _one(
            "newest_makes_room",
            "the newest whole step makes room for one that is still being received",
            "flusher.pipeline",
            "for flight in complete[:-1]\n",
            "for flight in reversed(complete)\n",
            900,
        ),
        _one(
            "place_given_before_it_is_said",
            "slots of a step that makes room are free while its file still says that it is staged",
            "flusher.engine",
            "        self._ring.remove_checkpoint(*found.older)\n",
            "",
            900,
        ),
        _one(
            "begun_is_dropped_at_once",
            "a step of which the store has parts goes as soon as one of which it has none",
            "flusher.flight",
            "(even_if_written and self.opened)",
            "self.opened",
            3000,
        ),
        # -- steps that may be torn
        _one(
            "doubt_unwritten",
            "ranks and flusher hear of a doubt before it is written beside the ring",
            "stager.doubt_handler",
            "            self._write()\n            reach(Point.DOUBT_WRITTEN)\n",
            "",
        ),
        _one(
            "doubt_of_the_published_only",
            "what becomes durable after the doubt is not marked",
            "flusher.verify_and_prune",
            "            if manifest is not None and (marked := self.marks.with_mark(manifest)) is not manifest:\n",
            "            if False:\n",
        ),
        # -- the proof of a resume
        _one(
            "proof_of_another_attempt",
            "whoever asks for the proof of a checkpoint gets that of the same step of any attempt",
            "holdfast.ring.proofs",
            "for one in read_proofs(directory) if one.key == key",
            "for one in read_proofs(directory) if one.key.step == key.step",
            3000,
        ),
        _one(
            "proof_without_checkpoint",
            "a proof is published though its checkpoint was not",
            "flusher.proof_writing",
            "            if file is None:\n                continue\n",
            "            file = file or candidate_names(record.key)[0]\n",
            900,
        ),
        _one(
            "proof_removed_alone",
            "verification of a checkpoint removes its proof",
            "flusher.verify_and_prune",
            '            self._guarded(self._prune, "old checkpoints not removed")\n        finally:',
            '            self._guarded(lambda: self._proofs.delete(key, known.file), "x")\n        finally:',
            900,
        ),
        _one(
            "proof_left_behind",
            "retention leaves the proof of a checkpoint that it removes",
            "flusher.proof_writing",
            "        self._store.delete(proof_name(file))\n",
            "",
            900,
        ),
        # -- the ring grows
        _one(
            "growth_unseen",
            "a stager does not look into the journal when it takes another flusher, of which the last one may have grown",
            "stager.flusher_handler",
            '                self._handle_grown("")\n',
            "",
            900,
        ),
        _one(
            "slots_before_word",
            "slots count as soon as there is memory for them, before the word in the journal",
            "holdfast.ring.ring",
            "        self._journal.refresh_slots()\n",
            "        self._journal.ring_chunks = os.fstat(self._ring_fd).st_size // self.chunk_bytes\n",
            900,
        ),
        _one(
            "word_unread",
            "whoever opens a ring takes it for as large as it was made",
            "holdfast.ring.journal",
            "        self.refresh_slots()\n",
            "",
            900,
        ),
        _one(
            "slots_to_come_counted",
            "an upload that keeps its chunks in the ring counts on slots for which there is no memory yet",
            "flusher.engine",
            "            self._growing = self._request_room(layout.chunks) or self._growing\n",
            "            self._growing = self._request_room(layout.chunks) or self._growing\n"
            "            self._pipeline.ring_chunks = 2 * layout.chunks + 8\n",
            900,
        ),
        _one(
            "decided_before_grown",
            "whether an upload keeps its chunks in the ring is decided before the ring has grown",
            "flusher.engine",
            "            elif isinstance(item, Opened) and self._growing and not item.resumable:\n",
            "            elif False:\n",
            900,
        ),
        _one(
            "fields_recalled",
            "a chunk that the flusher had patched is recalled with its CRC fields filled in",
            "trainer_side.restore.ring_slices",
            "            if begin < end:\n                view[begin:end] = bytes(end - begin)\n",
            "            pass\n",
            1500,
        ),
        _one(
            "welcome_without_whole",
            "the ranks are welcome though what is staged is neither in the store nor all in the ring",
            "stager.previous_jobs",
            "if key not in complete]",
            "if False]",
            3000,
        ),
        # -- state that is split
        _one(
            "regions_swapped",
            "whoever unites the regions takes each for that of other ranks",
            "holdfast.image.regions",
            "tuple(tuple(holders[region]) for region in regions)",
            "tuple(tuple(holders[region]) for region in reversed(regions))",
        ),
        _one(
            "one_row_off",
            "a region that does not begin with the tensor's first row lies one row further",
            "holdfast.image.regions",
            "        self._outer = region.size[:cut]\n",
            "        self._start += strides[0] if shape and region.start[0] else 0\n"
            "        self._outer = region.size[:cut]\n",
        ),
        Mutation(
            "run_and_stride_swapped",
            "runs of a region follow each other where they are as far apart as a row is long",
            (
                (
                    "holdfast.image.regions",
                    "            place += index * stride\n",
                    "            place += index * self.run_bytes\n",
                ),
                (
                    "holdfast.image.regions",
                    "            places += index * stride\n",
                    "            places += index * self.run_bytes\n",
                ),
            ),
        ),
        _one(
            "last_short_shard_dropped",
            "the last region is not sent where it is smaller than the first",
            "holdfast.image.regions",
            "        parts = min(len(holders), max(1, nbytes // DEAL_BYTES_MIN))\n",
            "        parts = min(len(holders), max(1, nbytes // DEAL_BYTES_MIN))\n"
            "        if number == len(self.regions) - 1 and nbytes < self.combs[0].nbytes:\n"
            "            return []\n",
        ),
        # -- the rank's side
        _one(
            "torn_is_staged",
            "a rank finds its copy torn, and gives it away all the same",
            "trainer_side.save.copier",
            '        """Withdraw a torn copy. Any thread."""\n',
            "        return\n",
        ),
        # -- the flusher's side
        _one(
            "sender_crc_unchecked",
            "what the senders stated is not compared",
            "holdfast.image.chunks",
            "if by_rank[source.rank] != source.crc32:",
            "if False:",
            1500,
        ),
        _one(
            "fields_not_zeroed",
            "a chunk that a dead flusher had patched is verified with its CRC fields filled in",
            "holdfast.image.chunks",
            "    _put(memory, fields.whole, 0)\n",
            "",
            1500,
        ),
        _one(
            "claim_unchecked",
            "a flusher publishes without a look at the claim",
            "flusher.writer_lease",
            "            self._claim.check(without_retries=True)\n",
            "            pass\n",
        ),
        Mutation(
            "slots_freed_before_written",
            "the slots of a part are free as soon as it is sent to the store",
            (
                (
                    "flusher.pipeline",
                    "        return self._start_jobs(flight, [WritePart(flight.key, part, pieces, crc, segment_crcs)])\n",
                    "        early = [] if flight.keeps_slots else [FreeSlots(tuple(slot for slot, _ in pieces))]\n"
                    "        return [*early, *self._start_jobs(flight, [WritePart(flight.key, part, pieces, crc, segment_crcs)])]\n",
                ),
                (
                    "flusher.pipeline",
                    "            freed.append(FreeSlots(tuple(flight.slots.pop(chunk) for chunk in chunks)))\n",
                    "            [flight.slots.pop(chunk) for chunk in chunks]\n",
                ),
            ),
        ),
        _one(
            "published_before_all_parts",
            "a file is published when all its parts are sent, written or not",
            "flusher.pipeline",
            "len(flight.parts_done) == len(flight.parts)\n",
            "len(flight.parts_sent) == len(flight.parts)\n",
        ),
        Mutation(
            "manifest_before_file",
            "the manifest is written before the file is published",
            (
                ("flusher.jobs", "                target.upload.publish()\n", "                pass\n"),
                (
                    "flusher.jobs",
                    "        self.manifests[job.key] = publish_manifest(self._store, manifest)\n",
                    "        self.manifests[job.key] = publish_manifest(self._store, manifest)\n"
                    "        target.upload.publish()\n",
                ),
            ),
        ),
        Mutation(
            "recorded_before_written",
            "the record says that the store has a part before it has",
            (
                (
                    "flusher.jobs",
                    "                    target.upload.write_part(job.part, buffers, job.crc32)\n",
                    "                    if target.progress is not None:\n"
                    "                        target.progress.add_part(job.part, job.segment_crcs)\n"
                    "                    target.upload.write_part(job.part, buffers, job.crc32)\n",
                ),
            ),
            4000,
        ),
        _one(
            "not_recorded",
            "slots are freed and no record says where their chunks went",
            "flusher.jobs",
            "                    target.progress.add_part(job.part, job.segment_crcs)\n",
            "                    pass\n",
        ),
        _one(
            "sweeps_what_goes_on",
            "a new flusher sweeps the uploads that its own ring still needs",
            "flusher.lifetime",
            "store.sweep(is_active)",
            "store.sweep()",
            1500,
        ),
        _one(
            "written_chunk_patched_again",
            "a chunk that a dead flusher wrote is patched again, without a slot",
            "flusher.pipeline",
            "if chunk not in flight.segment_crcs or flight.chunk_left[chunk] or flight.is_written(chunk):",
            "if chunk not in flight.segment_crcs or flight.chunk_left[chunk]:",
            1500,
        ),
        _one(
            "removed_comes_back",
            "a checkpoint that retention removed is read back, and its manifest written again",
            "flusher.verify_and_prune",
            "return known.write_id in self._removed",
            "return False",
            3000,
        ),
        _one(
            "names_without_attempt",
            "a later attempt takes the plain name where it is free, as a writer before it may be about to",
            "holdfast.checkpoints.publish",
            "return (plain, numbered, zero) if key.attempt == 1 else (numbered, zero)",
            "return (plain, numbered, zero)",
            1500,
        ),
        _one(
            "later_upload_swept",
            "a writer that stood still in its start sweeps the uploads of the one that has replaced it",
            "flusher.lifetime",
            " or writer_attempt(write_id) > attempt",
            "",
            3000,
        ),
        _one(
            "file_deleted_first",
            "retention deletes the file before its manifest",
            "flusher.verify_and_prune",
            "            self._store.delete(name)\n",
            "            self._store.delete(one.file)\n            self._store.delete(name)\n",
        ),
        _one(
            "size_unchecked",
            "the catalog lists a manifest whose file has another size",
            "holdfast.checkpoints.catalog",
            "if file_bytes != manifest.image_bytes:",
            "if False:",
        ),
        _one(
            "attempts_ignored",
            "the newest checkpoint is the one with the highest step",
            "holdfast.image.manifest",
            "return CheckpointId(self.attempt, self.step)",
            "return CheckpointId(0, self.step)",
            2000,
        ),
    )
}


class _Finder(importlib.abc.MetaPathFinder):
    """Loads the modules of the mutation with its edits applied."""

    def __init__(self, mutation: Mutation) -> None:
        self._mutation = mutation

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        edits = [(old, new) for module, old, new in self._mutation.edits if module == name]
        if not edits:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert isinstance(spec.loader, importlib.machinery.SourceFileLoader)
        spec.loader = _Loader(spec.loader.name, spec.loader.path, edits)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, edits: list[tuple[str, str]]) -> None:
        super().__init__(name, path)
        self._edits = edits

    def get_code(self, fullname: str) -> types.CodeType:
        text = self.get_source(fullname)
        assert text is not None
        for old, new in self._edits:
            if text.count(old) != 1:
                raise AssertionError(f"{fullname}: expected once, found {text.count(old)} times: {old!r}")
            text = text.replace(old, new)
        code: types.CodeType = compile(text, self.path, "exec")
        return code


def apply(name: str) -> None:
    """Load the product with this bug, for the life of this process. Call before any of its modules is loaded."""
    from tests.simulation.tcp_mutations import TCP_MUTATIONS

    install((MUTATIONS | TCP_MUTATIONS)[name])


def install(mutation: Mutation) -> None:
    """As `apply`, for a mutation from another list."""
    loaded = [module for module, _, _ in mutation.edits if module in sys.modules]
    assert not loaded, f"{loaded} are loaded already"
    sys.meta_path.insert(0, _Finder(mutation))
