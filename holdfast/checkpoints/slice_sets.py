"""Slices that training ranks wrote to the store themselves: their names, and which of them make a whole checkpoint.

    RUN/slices/step-000000123-a002-r00001of00004.slice        frames, padded (holdfast/image/slices.py)
    RUN/slices/step-000000123-a002-r00001of00004.seal.json    written last: only now the slice exists
    RUN/slices/layout-a002-<digest>.layout                    of all slices of that attempt and layout, before any seal
    RUN/slices/doubts-a002-r00001.json                        what rank 1 doubts, written once (holdfast/ring/doubts.py)

A *set* is what the store has of one (attempt, step) for one number of ranks. It is complete when all its seals are
there; no record of this is written, so none can be wrong. The names suffice to find and to remove a set; the contents
are untrusted input, which `load` reads with a limit on everything.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.errors import DamageError, ProtocolError, StoreMissing
from holdfast.faultpoint import Point, reach
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.layout import Layout
from holdfast.image.slices import SliceSeal, area_bytes
from holdfast.ring.doubts import DoubtedSteps, from_bytes, to_bytes
from holdfast.store.base import ObjectInfo, Store

PREFIX = "slices/"
SEAL_BYTES_MAX = 1 << 25  # a CRC for each of a million chunks, and a record; a larger one is not read at all
LAYOUT_BYTES_MAX = 1 << 28
CHUNK_BYTES_MAX = 1 << 30  # what one chunk may make us allocate; four times what anybody sets
_READERS = 8  # each seal is one small request
_SLICE = re.compile(r"slices/step-(\d{9,19})-a(\d{3,18})-r(\d{5,10})of(\d{5,10})(\.slice|\.seal\.json)")
_LAYOUT = re.compile(r"slices/layout-a(\d{3,18})-([0-9a-f]{64})\.layout")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_UPLOAD = re.compile(r"slice-a(\d{3,18})-")
_DOUBTS = re.compile(r"slices/doubts-a(\d{3,18})-r(\d{5,10})\.json")
_DOUBTS_BYTES_MAX = 1 << 20

_log = logging.getLogger("holdfast.catalog")


class SliceName(NamedTuple):
    """One rank's slice of one checkpoint, by name."""

    attempt: int
    step: int
    rank: int
    ranks: int

    @property
    def _base(self) -> str:
        return f"{PREFIX}step-{self.step:09d}-a{self.attempt:03d}-r{self.rank:05d}of{self.ranks:05d}"

    @property
    def slice(self) -> str:
        return f"{self._base}.slice"

    @property
    def seal(self) -> str:
        return f"{self._base}.seal.json"

    @property
    def order(self) -> CheckpointId:
        return CheckpointId(self.attempt, self.step)


def layout_name(attempt: int, digest: str) -> str:
    """Where the layout of the slices of an attempt lies.

    Each attempt has its own, so that clearing up after a dead attempt takes nothing from a living one.

    Raises:
        DamageError: The digest, which comes from outside, is malformed.
    """
    if not _DIGEST.fullmatch(digest):
        raise DamageError(f"layout digest: expected 64 hexadecimal digits, got {digest[:80]!r}")
    return f"{PREFIX}layout-a{attempt:03d}-{digest}.layout"


def slice_write_id(name: SliceName, random: str) -> str:
    """The write-id of a slice's upload: a sweep sees by it that it is a slice's, and of which attempt."""
    return f"slice-a{name.attempt:03d}-r{name.rank:05d}-{random}"


def upload_attempt(write_id: str) -> int | None:
    """The attempt of a slice's upload, from its write-id or what begins with it; None if it is no slice's."""
    match = _UPLOAD.match(write_id)
    return int(match[1]) if match else None


def is_slice_upload(write_id: str) -> bool:
    """Whether an unfinished upload is a slice's, and so none of the run's writer."""
    return upload_attempt(write_id) is not None


@dataclass
class SliceSet:
    """The slices of one checkpoint, as a listing of the store shows them.

    Attributes:
        attempt: Attempt of the job that wrote it. `step`: the step. `ranks`: of how many ranks.
        seals: Rank → bytes of its seal. `slices`: rank → bytes of its slice.
    """

    attempt: int
    step: int
    ranks: int
    seals: dict[int, int] = field(default_factory=dict)
    slices: dict[int, int] = field(default_factory=dict)

    @property
    def order(self) -> CheckpointId:
        """Newer checkpoints have a higher one (as `Manifest.order`)."""
        return CheckpointId(self.attempt, self.step)

    @property
    def complete(self) -> bool:
        """Whether every rank has sealed its slice."""
        return len(self.seals) == self.ranks

    @property
    def nbytes(self) -> int:
        return sum(self.slices.values())

    @property
    def fault(self) -> str:
        """Why it is no whole checkpoint, in words; empty when it looks like one."""
        if not self.complete:
            return f"{self.order}: {len(self.seals)} of {self.ranks} ranks have sealed their slice"
        return ""

    def name(self, rank: int) -> SliceName:
        return SliceName(self.attempt, self.step, rank, self.ranks)

    def names(self) -> list[SliceName]:
        return [self.name(rank) for rank in sorted(self.seals.keys() | self.slices.keys())]


class LoadedSet(NamedTuple):
    """A complete set whose seals agree."""

    found: SliceSet
    layout: Layout
    seals: tuple[SliceSeal, ...]


def find_sets(objects: Iterable[ObjectInfo]) -> list[SliceSet]:
    """The sets in a listing of the run, newest first, complete or not. Nothing is read."""
    found: dict[tuple[int, int, int], SliceSet] = {}
    for info in objects:
        match = _SLICE.fullmatch(info.name)
        if match is None:
            continue
        step, attempt, rank, ranks = (int(text) for text in match.groups()[:4])
        name = SliceName(attempt, step, rank, ranks)
        if not (rank < ranks < 2**31 and attempt >= 1) or info.name not in (name.slice, name.seal):
            continue
        here = found.setdefault((attempt, step, ranks), SliceSet(attempt, step, ranks))
        (here.seals if info.name == name.seal else here.slices)[rank] = info.nbytes
    return sorted(found.values(), key=lambda one: (one.order, one.ranks), reverse=True)


def read_seal(store: Store, name: SliceName) -> SliceSeal:
    """The seal of one slice.

    Raises:
        StoreMissing: It is gone.
        DamageError: It is not readable, or says something else than its name.
        StoreError: The store failed.
    """
    source = f"{store.url}/{name.seal}"
    seal = SliceSeal.from_bytes(store.read(name.seal, SEAL_BYTES_MAX), source=source)
    if (seal.attempt, seal.step, seal.rank, seal.ranks) != name:
        raise DamageError(
            f"{source}: the file is the seal of step {seal.step}, attempt {seal.attempt}, rank {seal.rank} of "
            f"{seal.ranks}: it was renamed or copied"
        )
    return seal


def read_layout(store: Store, attempt: int, digest: str) -> Layout:
    """The layout that a seal names.

    Raises:
        StoreMissing: It is gone.
        DamageError: It is not readable, another one, or of chunks that nobody could hold in memory.
        StoreError: The store failed.
    """
    name = layout_name(attempt, digest)
    source = f"{store.url}/{name}"
    try:
        layout = Layout.from_bytes(store.read(name, LAYOUT_BYTES_MAX))
    except ProtocolError as error:
        raise DamageError(f"{source}: {error}") from error
    if layout.digest != digest:
        raise DamageError(f"{source}: the file is the layout {layout.digest}: it was renamed or altered")
    if layout.chunk_bytes > CHUNK_BYTES_MAX:
        raise DamageError(
            f"{source}: expected chunks of at most {CHUNK_BYTES_MAX} bytes, got {layout.chunk_bytes}"
        )
    return layout


def load_set(store: Store, found: SliceSet) -> LoadedSet:
    """Read the seals and the layout of a set, and check that they belong together. Blocks; the slices are not read.

    Raises:
        DamageError: It is not complete, or its parts do not belong together; names which.
        StoreError: The store failed.
    """
    if not found.complete:
        raise DamageError(f"{store.url}: {found.fault}; take an older step")
    names = [found.name(rank) for rank in sorted(found.seals)]
    try:
        with ThreadPoolExecutor(_READERS, thread_name_prefix="seals") as readers:
            seals = tuple(readers.map(lambda name: read_seal(store, name), names))
        for name, seal in zip(names, seals, strict=True):
            if seal.layout_digest != seals[0].layout_digest:
                raise DamageError(
                    f"{store.url}: {found.order}: {names[0].seal} is of layout {seals[0].layout_digest[:16]}, "
                    f"{name.seal} of {seal.layout_digest[:16]}: they are no parts of one image"
                )
            if seal.save_record.job != seals[0].save_record.job:
                raise DamageError(
                    f"{store.url}: {found.order}: {names[0].seal} and {name.seal} are of two jobs with one attempt: "
                    "they are no parts of one image"
                )
        layout = read_layout(store, found.attempt, seals[0].layout_digest)
    except StoreMissing as error:
        raise DamageError(f"{store.url}: {found.order}: a part of it is gone: {error}") from error
    for name, seal in zip(names, seals, strict=True):
        seal.check_layout(layout, source=f"{store.url}/{name.seal}")
        expected, got = area_bytes(layout, name.rank), found.slices.get(name.rank, 0)
        if got != expected:
            raise DamageError(
                f"{store.url}/{name.slice}: {got} bytes, its seal and layout ask for {expected}; the set of "
                f"{found.order} is of no use, take another step"
            )
    return LoadedSet(found, layout, seals)


def remove_set(store: Store, found: SliceSet) -> list[str]:
    """Remove a set, all seals first: a slice without a seal is nothing, a seal without its slice would be a lie.

    Returns:
        The names of the removed objects.

    Raises:
        StoreError: The store failed; may be called again.
    """
    removed = []
    for rank in sorted(found.seals):
        store.delete(found.name(rank).seal)
        removed.append(found.name(rank).seal)
        reach(Point.SEAL_DELETED)
    for rank in sorted(found.slices):
        store.delete(found.name(rank).slice)
        removed.append(found.name(rank).slice)
    return removed


def remove_stale(store: Store, before_attempt: int) -> list[str]:
    """Remove what jobs before `before_attempt` left and nobody can use: incomplete sets, layouts and doubts of no seal.

    Only for the run's one writer, and only when the jobs of these attempts are known to have ended or to be fenced:
    a living one may be about to complete its set.

    Raises:
        StoreError: The store failed; may be called again.
    """
    objects = store.list()
    sets = [found for found in find_sets(objects) if found.attempt < before_attempt]
    removed = [name for found in sets if not found.complete for name in remove_set(store, found)]
    used = {found.attempt for found in sets if found.complete}
    for info in objects:
        match = _LAYOUT.fullmatch(info.name)
        attempt = int(match[1]) if match is not None else attempt_of(info.name)
        if attempt is not None and attempt < before_attempt and attempt not in used:
            store.delete(info.name)
            removed.append(info.name)
    return removed


def sweep_uploads(store: Store, before_attempt: int) -> list[str]:
    """Remove the unfinished uploads of slices of jobs before `before_attempt`: open multipart uploads, temporary files.

    Only when these jobs are known to have ended or to be fenced. Uploads of this attempt and later ones, and those of
    flushers, stay. Returns what was removed, in words.

    Raises:
        StoreError: The store failed; may be called again.
    """

    def is_kept(write_id: str) -> bool:
        attempt = upload_attempt(write_id)
        return attempt is None or attempt >= before_attempt

    return store.sweep(is_kept)


def complete_sets(sets: Sequence[SliceSet]) -> list[SliceSet]:
    """The sets that look whole, newest first."""
    return sorted((found for found in sets if found.complete), key=lambda one: one.order, reverse=True)


# -- doubts ------------------------------------------------------------------------------------------------------


def attempt_of(name: str) -> int | None:
    """The attempt in the name of a file of doubts; None for other names."""
    match = _DOUBTS.fullmatch(name)
    return int(match[1]) if match else None


def write_doubt(store: Store, steps: DoubtedSteps) -> None:
    """Write down what a rank doubts. Raises `StoreError`."""
    name = f"slices/doubts-a{steps.attempt:03d}-r{steps.doubt.rank:05d}.json"
    store.write(name, to_bytes([steps]))


def read_doubts_of(store: Store, objects: Iterable[ObjectInfo]) -> list[DoubtedSteps]:
    """Steps that ranks doubt, by this listing of the run. Raises `StoreError`."""
    found: list[DoubtedSteps] = []
    for info in objects:
        if attempt_of(info.name) is None:
            continue
        try:
            found += from_bytes(store.read(info.name, _DOUBTS_BYTES_MAX), source=f"{store.url}/{info.name}")
        except StoreMissing:  # its attempt was cleared away meanwhile
            continue
        except DamageError as error:
            _log.error("%s: which slices are doubtful cannot be read: %s", info.name, error)
    return found
