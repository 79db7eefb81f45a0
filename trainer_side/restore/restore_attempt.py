"""One candidate of a restore: read on every rank, and loaded if all ranks could read it.

    open      head and tail of the image                  slices: slice_reader.py     file: structure.py
    parse     the tree
    fit       choose this rank's part of the tree; compare names and shapes with the state
    read      all bytes, straight into the tensors        slices: slice_reader.py     file: reading.py
    load      the tree into the objects

Each stage ends with an agreement of all ranks (`trainer_side/ranks/peers.py`).
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.checkpoints.branches import Rewound
from holdfast.errors import DamageError, HoldfastError, StateError
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.layout import Layout
from holdfast.image.manifest import Manifest
from holdfast.image.save_record import StepRecord
from holdfast.store.base import Store
from holdfast.telemetry.events import EventLog
from holdfast.wire.step_proof import ResumeProof
from trainer_side.ranks.deadlines import HANGING_SHARE, within
from trainer_side.ranks.peers import Peers, agree, gather, raise_agreed
from trainer_side.restore.choice import STORE, Candidate, WantedBest
from trainer_side.restore.device_memory import allocate_on_device
from trainer_side.restore.device_sections import DeviceSections, PinnedAllocator
from trainer_side.restore.exchange import check_received
from trainer_side.restore.inventory import StoreListing, TierListing, ask_rank_0
from trainer_side.restore.joining_by_name import join_by_name
from trainer_side.restore.loading import check_state_fits, live_trees, load, may_refuse, open_per_rank
from trainer_side.restore.narrowing import StageNames, narrow, needs_all_names
from trainer_side.restore.read_plan import KeptSlice, Origin, ReadPlan, StoredFile, agree_on_plan, store_units
from trainer_side.restore.reading import Reading, ReadOptions, SourceUsage, read
from trainer_side.restore.scatter import Scatter
from trainer_side.restore.slice_reader import SliceReader
from trainer_side.restore.split_parts import (
    PlacedParts,
    allocate_split_moments,
    place_parts,
    split_parts,
    with_separate_memory,
)
from trainer_side.restore.structure import Structure, check_structure_chunks, read_structure_bytes
from trainer_side.restore.torch_loading import in_place_tensors, rewrap
from trainer_side.restore.two_values import Suspects, check_suspects, find_suspects
from trainer_side.restore.uncast import offloaded
from trainer_side.state.optimizer_places import locate_optimizers, optimizers_of
from trainer_side.state.per_rank import PerRank
from trainer_side.state.tree import record_param_groups, tensor_paths
from trainer_side.tiers.slot_proof import KeptProof

_log = logging.getLogger("holdfast.restore")


@dataclass(frozen=True)
class Restored:
    """The checkpoint that was restored, and how.

    Attributes:
        step: The saved step; training resumes with the step after it.
        attempt: The attempt that wrote the checkpoint.
        manifest: The store's manifest; None if only local tiers have this step.
        seconds: Duration of each phase on this rank: catalog, structure, read, exchange and check (several ranks),
            load.
        bytes_read: Bytes read by this rank: tensors, and padding between them.
        sources: Bytes that this rank read, by name of the tier or URL of the store.
        mended: Slices of all ranks that were damaged or missing in a tier and were read from elsewhere.
        skipped: Newer checkpoints that were not used, each with the reason.
        values: Plain values of the state by name. Lists and dictionaries have been filled in place; numbers, texts and
            tuples cannot be, so the script takes them from here.
        whole_in: Places known to have the whole checkpoint: tiers by name, the store by URL. The same on every rank.
        before: The checkpoint that restore would take if this one were set aside; None if no other exists.
        proof: Comparison of the first step with that of the previous run; None until that step.
        rewound: The `holdfast rewind` that led to this step; None otherwise, and once the new branch has checkpoints of
            its own.
        kept_trackers: Experiment tracker → its run, as recorded in slices in tiers or in the stager's ring.
        kept_proofs: The proofs of this checkpoint in this rank's tiers.
    """

    step: int
    attempt: int
    manifest: Manifest | None
    seconds: dict[str, float]
    bytes_read: int
    skipped: list[str]
    sources: dict[str, SourceUsage] = field(default_factory=dict)
    mended: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    whole_in: frozenset[str] = frozenset()
    before: CheckpointId | None = None
    proof: ResumeProof | None = None
    rewound: Rewound | None = None
    kept_trackers: Mapping[str, str] = field(default_factory=dict)
    kept_proofs: tuple[KeptProof, ...] = ()

    @property
    def trackers(self) -> dict[str, str]:
        """Experiment tracker → its run, where the script had one when it saved (docs/trackers.md)."""
        stored = {} if self.manifest is None else StepRecord.from_json(self.manifest.record).trackers
        return stored | dict(self.kept_trackers)


@dataclass(frozen=True)
class RestoreOptions:
    """Which checkpoint to restore, and limits on reading it."""

    step: int | None = None  # restore only this step; if it is damaged, restore none
    # Restore the best checkpoint of the store by this metric, or after damage the next best.
    best: WantedBest | None = None
    # Limit for reading one checkpoint, and again for its exchange. A tier or ring that takes more than a tenth of it
    # for one request counts as hanging, and the next source is asked.
    seconds_max: float = 600
    # If the store does not answer, take the newest checkpoint in the tiers, although the store may have a newer one.
    without_store: bool = False
    may_lack: frozenset[str] = frozenset()  # names that may be missing; they keep the script's values
    threads: int | None = None  # requests in flight from this rank; None: as many as suit the sources
    # Checkpoints to skip, each with all later ones of the same attempt.
    set_aside: Collection[CheckpointId] = ()
    # An object of this rank's state can skip batches, as `holdfast rewind` may require.
    can_skip: bool = False
    # Allocates page-locked host memory for transfers to a device; None: loading copies tensor by tensor.
    allocate_pinned: PinnedAllocator | None = None


@dataclass(frozen=True)
class RestoreJob:
    """The inputs of a restore that all candidates share, and the tiers that `SliceReader` found hanging."""

    state: Mapping[str, Any]
    store: Store | None
    peers: Peers
    events: EventLog | None
    tier_listing: TierListing
    store_listing: StoreListing
    options: RestoreOptions
    ring_is_near: bool = False  # every rank reads the stager's ring itself
    hanging: dict[tuple[int, str], str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """The run, for messages."""
        return "the tiers" if self.store is None else self.store.url

    def report(self, reasons: Sequence[str], instead: str, *, event: str = "skipped") -> None:
        """Report unused checkpoints or slices: rank 0 in the log, every rank in its events."""
        for reason in reasons:
            if self.peers.rank == 0:
                _log.warning("restore: %s; %s", reason, instead)
            if self.events is not None:
                self.events.emit(event, {"reason": reason, "instead": instead})


class RestoreAttempt:
    """One candidate. Training thread; every method is collective."""

    def __init__(
        self, job: RestoreJob, candidate: Candidate, seconds: Mapping[str, float], rewound: Rewound | None
    ) -> None:
        self._rewound = rewound
        self._job, self._candidate, self._peers = job, candidate, job.peers
        self._seconds = dict(seconds)
        self._image: Manifest | Layout
        self._manifest: Manifest | None = None
        self._slice_reader: SliceReader | None = None
        self._structure: Structure | None = None
        self._live: dict[str, Any] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._names, self._needs_all_names = StageNames({}, {}), False
        self._reading = Reading()
        self._suspects: Suspects = ()
        self._placed_parts = PlacedParts({}, frozenset(), 0)
        self._plan = ReadPlan()
        self._adopted_bytes = 0
        self._offloaded: frozenset[int] = frozenset()  # tensors of the tree, by id()
        self._in_place: frozenset[str] = frozenset()  # names of the state
        self._has_per_rank_values = any(isinstance(value, PerRank) for value in job.state.values())
        self._device_sections: DeviceSections | None = None

    def read(self) -> str | None:
        """Read all bytes. Return why this candidate cannot be used, or None. Collective."""
        try:
            self._prepare()
            self._read_all()
        except DamageError as damage:
            return str(damage)
        return None

    def _prepare(self) -> None:
        """Open, parse and fit. Raises `DamageError` on every rank, as `_read_all` does. Collective."""
        begun = time.monotonic()
        error = self._capture_stage_error(functools.partial(self._parse, self._open()))
        ranks: list[StageNames] = []
        if not self._peers.all_agree(error is None and not self._needs_all_names):
            raise_agreed(self._peers, error)
            ranks = self._names.gather_all(self._peers)
        error = self._capture_stage_error(functools.partial(self._fit, ranks))
        self._seconds["structure"] = time.monotonic() - begun
        raise_agreed(self._peers, error)

    def _read_all(self) -> None:
        assert self._structure is not None
        job = self._job
        structure, placed, peers = self._structure, self._placed_parts, self._peers
        if (pinned := job.options.allocate_pinned) is not None:
            on_host = self._offloaded
            self._device_sections = allocate_on_device(
                structure, placed, job.state, self._live, pinned, peers, on_host
            )
        self._plan = agree_on_plan(structure, placed, peers)
        try:
            if self._slice_reader is None:
                self._read_file()
                return
            try:
                self._slice_reader.read(self._plan.targets, self._device_sections)
            except DamageError:
                job.report(self._mended, "and nothing else has all of it", event="damaged")
                raise
            self._reading = self._slice_reader.reading
            self._seconds.update(self._reading.seconds)
            job.report(self._mended, "read from elsewhere", event="damaged")
        finally:
            if self._device_sections is not None:
                self._device_sections.finish()

    def _open(self) -> bytes:
        """Find the manifest or layout of the image, and return its head and tail. Collective."""
        job, candidate = self._job, self._candidate
        if candidate.stored != STORE:
            self._manifest = job.store_listing.manifest(candidate.stored, self._peers)
        if candidate.key is not None:
            return self._open_slices()
        assert self._manifest is not None
        assert job.store is not None
        self._image = self._manifest
        return ask_rank_0(self._peers, functools.partial(read_structure_bytes, job.store, self._manifest))

    def _open_slices(self) -> bytes:
        job, candidate = self._job, self._candidate
        self._image = layout = job.tier_listing.layout(candidate, self._peers)
        rank, own = self._peers.rank, job.tier_listing.own
        numbers = [one.number for some in candidate.slices.values() for one in some if one.rank == rank]
        origins: dict[int, Origin] = {number: KeptSlice(*own[number]) for number in numbers}
        if self._manifest is not None and job.store is not None:
            origins[STORE] = StoredFile(job.store, self._manifest)
        self._slice_reader = SliceReader(
            candidate,
            layout,
            origins,
            self._manifest,
            self._peers,
            ReadOptions(job.options.threads, job.options.seconds_max),
            job.hanging,
            ring_is_near=job.ring_is_near,
        )
        return self._slice_reader.read_ends()

    def _read_file(self) -> None:
        """Read all bytes from the store. Collective."""
        job, manifest, shared, own = self._job, self._manifest, self._plan.shared, self._plan.own
        assert manifest is not None
        assert job.store is not None
        origins = {STORE: StoredFile(job.store, manifest)}
        units = store_units(manifest, self._peers.ranks, self._plan.unshared)
        seconds_max = job.options.seconds_max
        read_options = ReadOptions(job.options.threads, seconds_max, self._device_sections)
        self._reading = read(manifest, units, origins, shared, self._peers, read_options)
        raise_agreed(self._peers, self._reading.error)
        if own:
            left = seconds_max - self._reading.seconds["read"]
            scatter = Scatter(manifest, own, self._peers, self._device_sections)
            read_options = read_options._replace(seconds_max=left)
            parts = read(manifest, scatter, origins, own, self._peers, read_options)
            self._reading.add(parts)
            raise_agreed(self._peers, parts.error)
        self._seconds.update(self._reading.seconds)
        if self._peers.ranks == 1:
            return
        begun = time.monotonic()
        sums = {**self._reading.sums, **self._reading.received}
        error = check_received(manifest, units, shared, sums, self._peers, threads=job.options.threads)
        self._seconds["check"] = time.monotonic() - begun
        raise_agreed(self._peers, error)

    def load(self, skipped: list[str], before: CheckpointId | None) -> Restored:
        """Load the tree into the objects of the state. Collective; `skipped`, `before`: See `Restored`."""
        assert self._structure is not None
        begun = time.monotonic()
        job, candidate = self._job, self._candidate
        tree, names, rank = self._structure.tree, self._structure.names, self._peers.rank
        values: dict[str, Any] = {}

        def open_all() -> None:
            self._plan.copy_remaining()
            check_suspects(self._suspects, tree, candidate.step)
            if self._has_per_rank_values:
                open_per_rank(job.state, self._live, tree, names, rank=rank)

        def load_all() -> None:
            # From here on only the tree holds bytes outside live memory, so that loading an object frees its part.
            self._structure, self._plan = None, ReadPlan()
            self._placed_parts = PlacedParts({}, frozenset(), 0)
            in_place, on_host = self._in_place, self._offloaded
            values.update(load(job.state, self._live, tree, in_place=in_place, on_host=on_host))

        for work in (open_all, load_all):
            problem = agree(self._peers, _capture_error(work))
            if problem is not None:
                raise DamageError(f"step {candidate.step}: {problem}")
        self._seconds["load"] = time.monotonic() - begun
        self._report(skipped)
        return Restored(
            step=candidate.step,
            attempt=candidate.attempt,
            manifest=self._manifest,
            seconds=self._seconds,
            bytes_read=self._reading.bytes_read,
            sources=self._reading.usage,
            mended=self._mended,
            skipped=skipped,
            values=values,
            whole_in=self._complete_in,
            before=before,
            rewound=self._rewound,
            kept_trackers=candidate.trackers,
            kept_proofs=self._kept_proofs(),
        )

    def _kept_proofs(self) -> tuple[KeptProof, ...]:
        """Return the proofs of this checkpoint in this rank's tiers, also if the store provided the bytes."""
        job, manifest, rank = self._job, self._manifest, self._peers.rank
        if not job.tier_listing.holders:
            return ()
        wanted: tuple[object, ...] | None = self._candidate.key
        if wanted is None and manifest is not None:
            wanted = *manifest.order, manifest.ranks, manifest.layout_digest
        proofs: list[KeptProof] = []
        for one in job.tier_listing.holders:
            if one.rank != rank or wanted is None or one.key[: len(wanted)] != wanted:
                continue
            tier, kept = job.tier_listing.own[one.number]
            if not tier.keeps_proofs or (rank, one.tier) in job.hanging:
                continue
            read_proof = functools.partial(tier.proof, kept)
            seconds_max = job.options.seconds_max * HANGING_SHARE
            digest, problem = None, ""
            try:
                digest = within(read_proof, seconds_max, name="holdfast-tier-proof")
            except (HoldfastError, OSError) as error:  # includes the TimeoutError of a hanging device
                problem = f"rank {rank}: tier {one.tier}: {error}"
            proof = KeptProof(one.slice_rank, one.key.ranks, digest, problem)
            if proof not in proofs:  # several tiers may have the same
                proofs.append(proof)
        return tuple(proofs)

    @property
    def _complete_in(self) -> frozenset[str]:
        tiers = self._slice_reader.complete_tiers if self._slice_reader is not None else frozenset[str]()
        job = self._job
        return tiers | {job.store.url} if job.store is not None and self._candidate.stored != STORE else tiers

    @property
    def _mended(self) -> list[str]:
        return self._slice_reader.mended if self._slice_reader is not None else []

    def _report(self, skipped: list[str]) -> None:
        """Report the sources: rank 0 logs those of all ranks, each rank emits its own as an event. Collective."""
        usage = {tier: [use.nbytes, round(use.seconds, 6)] for tier, use in self._reading.usage.items()}
        parts, places = [], dict[str, None]()
        for rank, message in enumerate(gather(self._peers, json.dumps(usage).encode())):
            for tier, (nbytes, seconds) in json.loads(message).items():
                places[tier] = None
                parts.append(f"rank {rank} {nbytes} bytes from {tier} in {seconds:.3g} s")
        saved_ranks = self._image.ranks
        if self._peers.rank == 0 and saved_ranks != self._peers.ranks:
            _log.warning(
                "step %d was saved by %d ranks, and this job has %d: the whole state is resumed, but the training "
                "that follows is not bit-identical",
                self._candidate.step,
                saved_ranks,
                self._peers.ranks,
            )
        if self._peers.rank == 0:
            # A warning, so that a script that does not configure logging shows that the job resumed.
            _log.warning(
                "resumed from step %d, attempt %d, in %.1f s%s",
                self._candidate.step,
                self._candidate.attempt,
                sum(self._seconds.values()),
                f", from {', '.join(places)}" if places else "",
            )
            _log.info(
                "restored from %s: %s",
                self._candidate.checkpoint,
                "; ".join(parts) or "no rank has read a byte",
            )
        if self._job.events is None:
            return
        self._job.events.emit(
            "restore",
            {
                "attempt": self._candidate.attempt,
                "file": None if self._manifest is None else self._manifest.file,
                "image_bytes": self._image.image_bytes,
                "bytes_read": self._reading.bytes_read,
                "sources": {tier: {"bytes": use[0], "seconds": use[1]} for tier, use in usage.items()},
                "in_place_bytes": self._adopted_bytes,
                "saved_ranks": saved_ranks,
                "ranks": self._peers.ranks,
                "seconds": self._seconds,
                "mended": self._mended,
                "skipped": skipped,
            },
            step=self._candidate.step,
        )

    def _capture_stage_error(self, work: Callable[[], None]) -> HoldfastError | None:
        try:
            error = _capture_error(work)
        except RecursionError as deep:
            return StateError(
                f"step {self._candidate.step}: the saved state is nested too deep to be loaded: {deep}"
            )
        if isinstance(error, StateError) and self._slice_reader is None:
            assert self._job.store is not None
            assert self._manifest is not None
            # The structure was parsed before its chunks were checked, so a flipped bit may be why it does not fit.
            check = functools.partial(check_structure_chunks, self._job.store, self._manifest)
            return _capture_error(check) or error
        return error

    def _parse(self, data: bytes) -> None:
        if self._slice_reader is None:
            assert self._manifest is not None
            file, store = self._manifest.file, self._job.store
        else:
            file, store = f"slices of {self._candidate.name}", None
        self._structure = Structure(file, self._image, data, store)
        if self._structure.on_host:
            self._offloaded = offloaded(self._structure)
        with record_param_groups(optimizers_of(self._job.state)) as given:
            self._live = live_trees(self._job.state)
        if isinstance(self._structure.tree, dict):
            rewrap(self._job.state, self._live, self._structure.tree)
        self._optimizers = locate_optimizers(self._live, self._job.state, given)
        self._names = StageNames.of(self._job.state, self._live)
        self._needs_all_names = needs_all_names(self._names, self._job.state, self._structure.tree)

    def _fit(self, ranks: Sequence[StageNames]) -> None:
        """Check that the state fits, and let tensors of the tree share live memory where possible.

        `ranks`: The names of each rank, if the ranks may be pipeline stages; else empty.
        """
        job, step, structure = self._job, self._candidate.step, self._structure
        assert structure is not None
        left_out: set[int] = set()
        if ranks:
            before = structure.entries
            numbered = narrow(job.state, structure.tree, ranks, self._peers.rank, structure.names)
            left_out = before - structure.entries
            for name in numbered:
                self._optimizers.pop(name, None)
        if not all(_has_names_only(job.state[name], live) for name, live in self._live.items()):
            join_by_name(job.state, self._live, structure.tree, structure.names, self._optimizers)
        parts = split_parts(job.state, self._live)
        live, tree, ranks_now = self._live, structure.tree, self._peers.ranks
        check_state_fits(job.state, live, parts, tree, step, ranks=ranks_now, may_lack=job.options.may_lack)
        self._suspects = find_suspects(job.state, live, tree, self._image, structure.entry_of, step)
        # If an object may still refuse the bytes, none is read into live memory.
        is_undecided = bool(self._suspects) or (self._has_per_rank_values and may_refuse(job.state))
        in_place = {} if is_undecided else in_place_tensors(job.state, self._live, structure.tree)
        self._in_place = frozenset(name for name, one in in_place.items() if tensor_paths([one]))
        own = {name: tree for name, tree in self._live.items() if name not in in_place}
        parts = {
            **with_separate_memory(parts, own, structure.tree),
            **allocate_split_moments(job.state, structure.tree),
        }
        self._placed_parts = place_parts(structure, parts, job.state, left_out)
        self._adopted_bytes = structure.adopt(in_place) + self._placed_parts.nbytes


def _capture_error(work: Callable[[], object]) -> HoldfastError | None:
    try:
        work()
    except HoldfastError as error:
        return error
    return None


def _has_names_only(value: Any, live: Any) -> bool:
    """Whether all tensors of a value have names: none is in a list, or in an optimizer's state by number."""
    if isinstance(value, torch.nn.Module):
        return all(isinstance(one, torch.Tensor) for one in live.values())
    return isinstance(value, torch.Tensor)
