"""Invariants that must hold after every event, whatever happened.

staged  ⇒ recoverable    each chunk is FULL in the ring, or in a part that the store has and the record names, or all
                         is published; but while the store accepts nothing and the ring has no room for the next step,
                         an old step may be dropped for a newer one that is just as safe
whole   ⇒ staged         a step that is whole in the ring, and that every rank is done with, is staged, begun or not
listed  ⇒ complete       every manifest that the real catalog lists fits exactly one checkpoint that was saved, and
                         its file is there with these bytes (or its CRCs show that the ring was damaged)
recalled ⇒ saved         bytes that a restore gets from the ring, in FULL slots or free ones, belong to the step that
                         the ring names; and steps staged before are there (tests/simulation/hot.py)
slots                    each has one owner; payloads land only in the slot that waits for them; all free at the end
grown                    the stager has no slot that the journal lacks, and soon each one that the journal has
in flight                at most two checkpoints are being received
torn ⇒ withdrawn         if a rank has copied other bytes of a step than were saved, the step is never staged, and
                         every living rank learns that it is withdrawn
doubted ⇒ marked         if a rank was told that a step is doubtful, the step's manifest has the mark in the end
one writer               nothing becomes visible without a look at the claim right before it, in each try
replaced ⇒ harmless      a frozen writer that is replaced and wakes changes nothing that was published since
every wait ends          when faults stop, every step has its verdict, every process ends, all staged is durable
"""

from __future__ import annotations

import json
import struct
import traceback
import zlib
from typing import TYPE_CHECKING, Any

from flusher.progress import Head, _complete_lines, progress_path
from holdfast.checkpoints.catalog import Catalog
from holdfast.config import IN_FLIGHT_MAX
from holdfast.errors import HoldfastError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.manifest import Manifest, State, is_manifest_name
from holdfast.ring.journal import _ADDED_OFFSET, SlotState
from holdfast.ring.ring import Ring
from holdfast.telemetry.causes import DeclineCause
from stager.session.checkpoint import Phase
from tests.simulation.hot import check_remains
from tests.simulation.scheduler import Process, Task
from tests.simulation.store import OpenUpload, pristine
from tests.simulation.transport import Job
from trainer_side.transfer import TransferState

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["Checks"]


RING_CHUNKS = 8
_GROWTH_TOLD_SECONDS_MAX = 2.0
_STANDS_SECONDS_MIN, _STANDS_SECONDS_MIN_BEGUN = 5.0, 30.0  # see docs/ring.md
_ADDED = struct.Struct("<I")
UNSEEN_FAULTS = frozenset({"cut", "half", "slow"})  # of connections: code above the ports does not see them


class Checks:
    """The invariants of one world.

    Attributes:
        tainted: Checkpoints in which a bit was flipped: they may fail, and must not be restored as good.
        promised: Staged checkpoints, which must become durable.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.tainted: set[CheckpointId] = set()
        self.promised: dict[CheckpointId, str] = {}  # → layout digest
        self.excused: dict[CheckpointId, str] = {}
        self.durable: set[CheckpointId] = set()
        self._seen_version = -1
        self.ring_changed = False
        self._slots_seen = False  # as they are now
        # Both hold the objects themselves: an `id` could be reused by a new object.
        self._last_look: dict[Task | None, int] = {}  # acts since its last look at the claims
        self._complete: dict[str, tuple[bytes, bytes | None]] = {}  # manifest → itself and its file
        self._job_of: dict[int, int] = {}  # attempt → job
        self.job_of_attempt: dict[int, int] = {}  # as the ring says
        self._intruded = False
        self.winners: dict[str, bytes] = {}  # what another host has published since it took the run over
        self.winners_upload = ""
        self.winners_attempt = 0
        self.failure = ""
        self._growth_known_at = 0.0

    def broken(self, what: str) -> None:
        from tests.simulation.world import Broken

        self.failure = self.failure or what  # the product may swallow an exception raised within its own code
        raise Broken(what)

    # -- after each event ----------------------------------------------------------------------------------------

    def after_event(self) -> None:
        if self.failure:
            self.broken(self.failure)
        version = self._world.store.version
        store_changed = version != self._seen_version
        if store_changed:
            self._seen_version = version
            self.winner_is_untouched()
            self.listed_is_complete()
            self._world.proofs.after_change()
        if store_changed or self.ring_changed:
            self.ring_changed = False
            self.staged_is_recoverable()
        scheduler = self._world.scheduler
        # Only events of these processes change slots and their owners; after other events the last result holds.
        if scheduler.ran is None or scheduler.ran.kind in {"stager", "flusher"}:
            self._slots_seen = False
        if scheduler.events % 3 == 0 and not self._slots_seen:
            self._slots_seen = True
            self.slots_have_one_owner()

    # -- replaced => harmless -------------------------------------------------------------------------------------

    def winner_is_untouched(self) -> None:
        """Files that the newer attempt has published stay as they are, whatever its replaced writer still does."""
        if not self.winners:
            return
        state, attempt = self._world.store, self.winners_attempt
        claims = [name for name in state.objects if name.startswith(".holdfast/writer-")]
        if max(claims, default="") > f".holdfast/writer-{attempt:06d}.json":
            return  # the winner was replaced itself, and its successor may change its files
        for name, data in self.winners.items():
            if state.objects.get(name) is not data:
                what = "removed" if name not in state.objects else "written over"
                self.broken(f"{name} of attempt {attempt} was {what} by a writer that it had replaced")
        if self.winners_upload not in state.uploads:
            self.broken(f"an upload of attempt {attempt} was swept by a writer that it had replaced")

    # -- listed => complete --------------------------------------------------------------------------------------

    def listed_is_complete(self) -> None:
        """Every checkpoint that the real catalog lists is whole, and is exactly one saved checkpoint."""
        state = self._world.store
        names = [name for name in state.objects if is_manifest_name(name)]
        if all(self._is_known(name) for name in names):
            return
        for item in Catalog(pristine(state)).list():
            if item.manifest is None:
                self.broken(f"listed but not complete: {item.name}: {item.fault}")
            manifest = item.manifest
            assert manifest is not None
            if state.objects[item.name] is self.winners.get(item.name):
                continue  # published by another host, from a training of its own
            if item.file_bytes != manifest.image_bytes or (item.fault and manifest.state is not State.BAD):
                self.broken(f"listed but not complete: {item.fault} ({item.file_bytes} bytes)")
            self._check_manifest(manifest, state.objects[manifest.file])
        self._complete = {name: self._as_it_is(name) for name in names}

    def _as_it_is(self, name: str) -> tuple[bytes, bytes | None]:
        objects = self._world.store.objects
        return objects[name], objects.get(name.removesuffix(".json") + ".pt")

    def _is_known(self, name: str) -> bool:
        known, found = self._complete.get(name), self._as_it_is(name)
        return known is not None and known[0] is found[0] and known[1] is found[1]

    def _check_manifest(self, manifest: Manifest, data: bytes) -> None:
        key = CheckpointId(manifest.attempt, manifest.step)
        job = self._fits(manifest)
        if job is None:
            self.broken(f"{manifest.file}: the manifest's CRCs fit no checkpoint that was ever saved: a mix")
            return
        known = self._job_of.setdefault(manifest.attempt, job)
        if known != job:
            self.broken(f"{manifest.file}: attempt {manifest.attempt} is of job {known} and of job {job}")
        order = self._world.order_of
        if any(
            (a < manifest.attempt) != (order(j) < order(job)) for a, j in self._job_of.items() if j != job
        ):
            self.broken(f"attempts do not follow the jobs: {self._job_of}")
        if zlib.crc32(data) != manifest.image_crc32 or len(data) != manifest.image_bytes:
            if key not in self.tainted:
                self.broken(f"{manifest.file}: its bytes are not those that its manifest states")
            if manifest.state is State.VERIFIED:
                self.broken(f"{manifest.file}: was verified, and its bytes are wrong")
        elif manifest.state is State.BAD:
            self.broken(f"{manifest.file}: marked bad, and whole: {manifest.note}")
        self.durable.add(key)
        self.promised.pop(key, None)

    def _fits(self, manifest: Manifest) -> int | None:
        """Find the job whose checkpoint this is, by every chunk's CRC."""
        for (job, step), made in self._world.images.items():
            if step == manifest.step and zlib.crc32(made.final) == manifest.image_crc32:
                layout = made.layout
                extents = [layout.chunk_extent(chunk) for chunk in range(layout.chunks)]
                crcs = tuple(zlib.crc32(made.final[e.offset : e.end]) for e in extents)
                if crcs == manifest.chunk_crc32s and job in self._jobs_offering(step):
                    return job
        return None

    def _jobs_offering(self, step: int) -> set[int]:
        return {offer.job for offer in self._world.offered if offer.step == step}

    # -- staged => recoverable -----------------------------------------------------------------------------------

    def staged(self, key: CheckpointId, digest: str) -> None:
        """The ring marks the step as staged: from now on it must survive."""
        self.ring_changed = True
        job = self.job_of_attempt[key[0]] = self._world.scheduler.here.notes["job"].number
        if (job, key[1]) in self._world.torn:
            self.broken(f"step {key[1]} (attempt {key[0]}) is staged, and its copy was torn on a rank")
        if key in self.durable or self._intruded:
            return
        self.promised[key] = digest
        plan = self._world.plan
        service = self._world.scheduler.here.notes["service"]
        unnoticed = not service._line.lost_reason and not any(f.alive for f in self._world.flushers)
        if plan.outgrows_ring and plan.store_kind == "opaque" and unnoticed:
            # When the stager knows that its flusher has died, it withdraws steps in an upload that cannot be continued.
            # Here it staged the step before it could know.
            self.excused[key] = "its upload cannot be continued by another process"

    def staged_is_recoverable(self) -> None:
        if not self.promised:
            return
        ring = self._world.ring()
        kept = [key for key in self.promised if key not in self.tainted and key not in self.excused]
        in_ring = self._chunks_in(ring) if ring is not None and kept else {}
        for key in kept:
            digest = self.promised[key]
            if ring is None:
                self.broken(f"step {key[1]} (attempt {key[0]}) was staged, and the ring is gone")
                return
            layout = self._world.plan.image(0).layout
            if layout.digest != digest:
                self.broken(f"step {key[1]} is staged with the layout {digest[:16]}, which nobody announced")
            missing = set(range(layout.chunks)) - in_ring.get(key, set())
            if missing:
                missing -= self._recorded_chunks(ring, key)
            if missing and self._world.store.kind == "opaque" and self._world.plan.outgrows_ring:
                continue  # no other process can continue such an upload: not promised
            if missing:
                self.broken(
                    f"step {key[1]} (attempt {key[0]}) was staged, and chunks {sorted(missing)} are neither in the "
                    "ring nor in the store by its record"
                )

    def forgotten(self, ring: Ring, key: CheckpointId) -> None:
        """The flusher removes the record of a whole checkpoint: allowed only to make room for a newer one."""
        if key not in self.promised or key in self.tainted or key in self.excused or self._intruded:
            return
        world, chunks = self._world, self._world.plan.image(0).layout.chunks
        in_ring = self._chunks_in(ring)

        def is_whole(other: CheckpointId) -> bool:
            return (
                len(in_ring.get(other, set()) | (self._recorded_chunks(ring, other) & set(range(chunks))))
                == chunks
            )

        if not is_whole(key):
            return  # dropped for another reason, which other checks cover
        rots = any(fault.what == "rot" for fault in world.plan.faults)
        newer = [
            other
            for other in self.promised
            if other > key
            and is_whole(other)
            and (rots or other not in self.tainted)
            and other not in self.excused
        ]
        if not newer:
            self.broken(
                f"step {key[1]} (attempt {key[0]}) is dropped from the ring, and no newer one is whole there"
            )
        names = [name for name in ring.checkpoint_ids() if ring.checkpoint(*name).state == "receiving"]  # type: ignore[union-attr]
        coming = sum(chunks - len(in_ring.get(name, set())) for name in names)
        if coming <= ring.ring_chunks - sum(map(len, in_ring.values())):
            self.broken(f"step {key[1]} (attempt {key[0]}) is dropped from the ring, which has room")
        begun = bool(self._recorded_chunks(ring, key))
        stalled_seconds = world.scheduler.now - world.store.took_at
        if stalled_seconds < (_STANDS_SECONDS_MIN_BEGUN if begun else _STANDS_SECONDS_MIN):
            self.broken(
                f"step {key[1]} is dropped from the ring, and the store took something {stalled_seconds:.1f} s ago"
            )
        self.excused[key] = f"gave its place to step {max(newer)[1]}"

    @staticmethod
    def _chunks_in(ring: Ring) -> dict[CheckpointId, set[int]]:
        """Chunks in FULL slots of the ring, of each checkpoint."""
        found: dict[CheckpointId, set[int]] = {}
        for slot in range(ring.ring_chunks):
            record = ring.record(slot)
            if record.state is SlotState.FULL:
                found.setdefault(CheckpointId(record.attempt, record.step), set()).add(record.chunk)
        return found

    def _recorded_chunks(self, ring: Ring, key: CheckpointId) -> set[int]:
        """Chunks in parts that the record beside the ring names and the store has."""
        try:
            _, lines = _complete_lines(progress_path(ring.directory, key).read_bytes())
        except FileNotFoundError:
            return set()
        if not lines:
            return set()
        head = Head.model_validate_json(lines[0])
        store = self._world.store
        upload = store.uploads.get(head.token)
        in_place = store.owners.get(head.file) == head.write_id
        part_chunks = head.part_bytes // ring.chunk_bytes
        found: set[int] = set()
        for line in lines[1:]:
            part = json.loads(line).get("part")
            if part is not None and (in_place or (upload is not None and part in upload.parts)):
                found.update(range(part * part_chunks, (part + 1) * part_chunks))
        return found

    # -- slots ---------------------------------------------------------------------------------------------------

    def slot_is_filling(self, rank: int, slot: int, what: tuple[int, int] | None) -> None:
        """A receive is posted, or a payload lands: the journal must say that the slot waits for exactly that chunk."""
        process = self._world.jobs[-1].stager
        service = process.notes.get("service") if process is not None else None
        if service is None:
            return
        record = service._line.flusher.ring.record(slot)  # of the ring that the stager has mapped
        if record.state is not SlotState.FILLING:
            self.broken(f"slot {slot} takes bytes of rank {rank} while it is {record.state.name}")
        if what is not None and (record.step, record.chunk) != what:
            self.broken(
                f"slot {slot} waits for step {record.step}, chunk {record.chunk}, and gets step {what[0]}, chunk "
                f"{what[1]} of rank {rank}"
            )

    def slots_have_one_owner(self) -> None:
        """The session's free, filling and handed-over slots are all slots, each once, and the journal agrees."""
        for job in self._world.jobs[-1:]:
            process = job.stager
            if process is None or not process.alive or process.killed:
                continue
            service = process.notes.get("service")
            if service is None:
                continue
            self._session_is_sound(process, service)

    def _session_is_sound(self, process: Process, service: Any) -> None:
        session = service._session
        if self._between_turns(process):
            self._whole_is_staged(session)
        under_way = [c for c in session._open.values() if c.under_way]
        if len(under_way) > IN_FLIGHT_MAX:
            self.broken(f"{len(under_way)} checkpoints are in flight, at most {IN_FLIGHT_MAX} may be")
        filling = [slot for c in session._open.values() for slot in c.open_slots.values()]
        free, handed = session._slots.free, list(session._slots.flusher_slots)
        everything = sorted([*free, *filling, *handed])
        ring = service._line.flusher.ring
        if everything != list(range(ring.ring_chunks)):
            self.broken(f"slots: free {free}, filling {filling}, with the flusher {handed}")
        if self._world.plan.growth_chunks >= 0:
            self._growth_is_known(service, ring)
        if not self._between_turns(process):
            return
        for slots, state in ((free, SlotState.FREE), (filling, SlotState.FILLING)):
            for slot in slots:
                if ring.state(slot) is not state:
                    self.broken(f"slot {slot} is {ring.state(slot).name}, the stager has it as {state.name}")
        for checkpoint in session._open.values():
            for (chunk, rank), credit in checkpoint.credits.items():
                if checkpoint.phase is not Phase.STAGED and checkpoint.open_slots.get(chunk) != credit.slot:
                    self.broken(f"rank {rank} has a credit for slot {credit.slot}, which is not its chunk's")

    def _whole_is_staged(self, session: Any) -> None:
        for checkpoint in session._open.values():
            done = checkpoint.done | session._admission.absent
            if (
                checkpoint.under_way
                and checkpoint.layout
                and not checkpoint.frames_missing
                and len(done) == session.ranks
            ):
                self.broken(f"step {checkpoint.step} lies whole in the ring, and is {checkpoint.phase.value}")

    def _growth_is_known(self, service: Any, ring: Ring) -> None:
        """The stager has all slots of the journal soon after a flusher reports them; never others."""
        world, now = self._world, self._world.scheduler.now
        with_memory = ring.ring_chunks
        in_journal = (
            ring._journal.header.ring_chunks + _ADDED.unpack_from(ring._journal_map, _ADDED_OFFSET)[0]
        )
        if with_memory > in_journal:
            self.broken(f"the stager has {with_memory} slots, the journal {in_journal}")
        lately = now - _GROWTH_TOLD_SECONDS_MAX
        stands_still = any(process.stopped_until > lately for process in world.processes)
        is_served = not service._line.lost_reason and any(flusher.alive for flusher in world.flushers)
        if with_memory == in_journal or stands_still or not is_served:
            self._growth_known_at = now
        elif self._growth_known_at < lately:
            self.broken(f"the journal has {in_journal} slots, and the stager still uses {with_memory}")

    def ring_is_remembered(self) -> None:
        """Records that count as whole in the ring match the bytes in their slots, for any checkpoint."""
        ring = self._world.ring()
        if ring is not None:
            check_remains(self._world, ring)

    @staticmethod
    def _between_turns(process: Process) -> bool:
        """Whether the stager's loop is at rest: all actions of the session are done."""
        main = process.tasks[0]
        return main.place in {"poll", "sleep", "selector"}

    # -- one writer ----------------------------------------------------------------------------------------------

    def store_act(self, process: Process, what: str, name: str) -> None:
        """Check an operation of the store right before it takes effect."""
        task = self._world.scheduler.current
        if what == "list":
            self._last_look[task] = 0
            return
        looked = self._last_look.get(task, 99)
        self._last_look[task] = looked + 1
        visible = what == "publish" or (what in {"write", "create", "delete"} and name.startswith("step-"))
        # list, then read of the own claim, then the act: in each try, also after a lost answer.
        if visible and looked > 1:
            self.broken(f"{process.name}: {what} {name} without a look at the claim right before it")

    def object_written(self, process: Process, name: str) -> None: ...

    def upload_swept(self, upload: OpenUpload) -> None: ...

    def intruded(self) -> None:
        """Another writer owns the run: its flusher is now responsible for staged steps."""
        self._intruded = True
        for key in self.promised:
            self.excused[key] = "the run was taken over"

    def node_lost(self) -> None:
        """The ring is lost, and with it all steps that were only staged."""
        self.promised.clear()
        self._world.doubted.clear()  # the doubts were written beside the ring

    def flusher_ended(self, process: Process) -> None:
        self.ring_changed = True
        plan = self._world.plan
        if plan.store_kind == "opaque" and plan.outgrows_ring:
            for key in self.promised:
                self.excused[key] = "its upload cannot be continued by another process"

    # -- at the end ----------------------------------------------------------------------------------------------

    def at_the_end(self) -> None:
        """Faults have stopped and time has passed: nothing waits, nothing is left over, nothing is lost."""
        world = self._world
        for process in world.processes:
            for name, error in process.notes.get("raised", []):
                where = "".join(traceback.format_exception(error))
                self.broken(f"{process.name}/{name} ended with {type(error).__name__}: {error}\n{where}")
        self.listed_is_complete()
        self.staged_is_recoverable()
        for offer in world.offered:
            self._check_offer(offer)
        held = bool(world.store.full)
        for key in sorted(self.promised):
            if key in self.tainted or key in self.excused or self._intruded:
                continue
            if not held:
                self.broken(f"step {key[1]} (attempt {key[0]}) was staged and never became durable")
            self._check_held(key)
        if not held and not self._intruded:
            self._nothing_is_left()
            self._doubted_is_marked()
        self._newest_is_restored()
        self._world.proofs.at_the_end(undisturbed=self._undisturbed)

    def _doubted_is_marked(self) -> None:
        for item in Catalog(pristine(self._world.store)).list():
            if item.order in self._world.doubted and item.is_good and not item.doubt:
                self.broken(
                    f"{item.order} is doubtful, as a rank has heard, and its manifest does not say so"
                )

    def _check_offer(self, offer: Any) -> None:
        if offer.process.notes.get("struck"):
            return
        state = offer.transfer.state
        if not (state.is_final or state is TransferState.STAGED):
            self.broken(f"rank {offer.rank} of job {offer.job}: step {offer.step} is still {state.value}")
        is_torn = (offer.job, offer.step) in self._world.torn
        if is_torn and state not in {TransferState.DECLINED, TransferState.FAILED}:
            self.broken(
                f"rank {offer.rank} of job {offer.job}: step {offer.step} was torn on a rank, and is {state.value}"
            )
        if is_torn and self._undisturbed and offer.transfer.reason.cause not in {DeclineCause.TORN, "busy"}:
            self.broken(f"step {offer.step} was torn, and that is not why it ended: {offer.transfer.reason}")
        if state is TransferState.FAILED and self._undisturbed and not self._left_early(offer):
            self.broken(f"nothing is wrong, and step {offer.step} failed: {offer.transfer.reason}")

    @staticmethod
    def _left_early(offer: Any) -> bool:
        """Whether the rank has left when all was staged, and so never learns the outcome."""
        return (
            bool(offer.process.notes.get("left_staged"))
            and offer.transfer.reason.cause == DeclineCause.UNKNOWN
        )

    @property
    def _undisturbed(self) -> bool:
        """Whether no fault hits this world: then no step fails, and no newer step displaces an older one."""
        plan = self._world.plan
        faults = [fault for fault in plan.faults if fault.what not in UNSEEN_FAULTS]
        return not (faults or plan.full or plan.fail_share or plan.slow_seconds)

    def _check_held(self, key: CheckpointId) -> None:
        if not self._world.ring_directory_holds("journal"):
            self.broken(f"step {key[1]} (attempt {key[0]}): the store is full, and the ring is gone")

    def _nothing_is_left(self) -> None:
        world = self._world
        if world.ring_directory_holds("journal"):
            self.broken("the ring is still there at the end")
        if world.store.uploads and not world.node_lost:
            names = [upload.name for upload in world.store.uploads.values()]
            if world.flushers and world.flushers[-1].notes.get("ready"):
                self.broken(f"uploads are left open: {names}")

    def _newest_is_restored(self) -> None:
        world = self._world
        try:
            found = Catalog(pristine(world.store)).get()
        except HoldfastError:
            return
        good = [
            manifest
            for name, data in world.store.objects.items()
            if is_manifest_name(name)
            for manifest in [Manifest.from_bytes(data, source=name)]
            if manifest.state is not State.BAD
        ]
        preferred = [manifest for manifest in good if not manifest.caveat] or good
        newest = max(((manifest.attempt, manifest.step) for manifest in preferred), default=None)
        if newest != (found.attempt, found.step):
            self.broken(
                f"restore takes step {found.step} of attempt {found.attempt}, the newest good one is {newest}"
            )
        self._damage_is_seen(found)

    def _damage_is_seen(self, found: Manifest) -> None:
        """Damage a file and a manifest: the catalog must offer neither to a restore."""
        store, chance = self._world.store, self._world.scheduler.chance
        name = found.file.removesuffix(".pt") + ".json"
        for damaged in (found.file, name):
            whole = store.objects[damaged]
            flipped = bytearray(whole)
            flipped[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
            store.objects[damaged] = whole[:-1] if damaged == found.file else bytes(flipped)
            if any(item.name == name and not item.fault for item in Catalog(pristine(store)).list()):
                self.broken(f"{damaged} is damaged, and the catalog says nothing of it")
            store.objects[damaged] = whole

    def deadlines_held(self, job: Job) -> None:
        """Two minutes after a process vanished, every living rank has the verdict of every step offered before."""
        plan = self._world.plan
        if plan.slow_seconds or plan.full or any(fault.what in {"stop", "freeze"} for fault in plan.faults):
            return
        for offer in self._world.offered:
            waits = offer.job == job.number and not offer.transfer.settled.is_set()
            if waits and offer.process.alive and offer.at < self._world.scheduler.now - 110.0:
                self.broken(
                    f"rank {offer.rank}: step {offer.step} has no verdict two minutes after it was offered"
                )


def watch_ring(world_of: Any) -> None:
    """Make the ring report each checkpoint that is staged or removed, and each slot that is freed."""
    write_checkpoint, free, remove = Ring.write_checkpoint, Ring.free, Ring.remove_checkpoint

    def write(self: Ring, attempt: int, step: int, state: Any, layout_digest: str, record: Any) -> None:
        world_of().scheduler.check_alive()
        write_checkpoint(self, attempt, step, state, layout_digest, record)
        if state == "staged":
            world_of().checks.staged(CheckpointId(attempt, step), layout_digest)

    def freed(self: Ring, slot: int) -> None:
        world_of().scheduler.check_alive()
        free(self, slot)
        world_of().checks.ring_changed = True

    def forget(self: Ring, attempt: int, step: int) -> None:
        world_of().scheduler.check_alive()
        world_of().checks.forgotten(self, CheckpointId(attempt, step))
        remove(self, attempt, step)

    Ring.write_checkpoint, Ring.free, Ring.remove_checkpoint = write, freed, forget  # type: ignore[method-assign]
