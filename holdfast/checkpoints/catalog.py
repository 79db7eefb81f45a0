"""The list of a run's checkpoints, newest first. It reads manifests only; `verification.py` reads the bytes.

    newest_first()   one manifest after the other, each read on demand           `holdfast ls`, report
    newest_good()    reads until one may be restored                             flusher, `holdfast import`
    get(step)        one of them, by its step or the newest good one             `holdfast inspect|verify|pull URL@STEP`

Newest is the highest (attempt, step), never a time. A file without a manifest is not a checkpoint and is not listed. A
manifest names every tensor, so nothing here keeps more manifests than are being read. After `holdfast rewind` the
newest one is searched on the current line only (branches.py); an older branch is listed, and found by its step.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from holdfast.checkpoints.branches import Branches
from holdfast.checkpoints.lease import plain_names_are_first
from holdfast.checkpoints.manifest_order import (
    ListedManifest,
    describe_old_slices,
    manifests_in,
    newest_first,
    step_of,
)
from holdfast.errors import DamageError, StoreError, StoreMissing
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.manifest import MANIFEST_BYTES_MAX, Manifest, State, manifest_name
from holdfast.image.proof_record import proof_name
from holdfast.store.base import ObjectInfo, Store

_log = logging.getLogger("holdfast.catalog")

# a manifest is one small request: a long run on S3 would otherwise be listed one round trip at a time
_READERS = 8
_AHEAD_BYTES = 32 << 20  # of manifests that are read ahead
_NEAR_STEPS = 5


@dataclass(frozen=True, slots=True)
class CatalogItem:
    """One manifest of the run, readable or not."""

    name: str
    attempt: int  # the run's newest attempt if neither name nor content can tell it
    step: int
    manifest: Manifest | None  # None if it cannot be read
    fault: str  # why restore does not use it, for people; empty if it may
    file_bytes: int | None  # size of the portable file in the store; None without the file
    is_unreadable: bool = False  # the fault is that the store lists the manifest but cannot read it
    has_proof: bool = False  # a proof lies beside it, so that a resume from it can be proven

    @property
    def order(self) -> CheckpointId:
        return CheckpointId(self.attempt, self.step)

    @property
    def is_good(self) -> bool:
        """Whether restore may use it, perhaps only if there is no better one (`caveat`)."""
        return self.manifest is not None and not self.fault

    @property
    def drift(self) -> str:
        """How its replicas differed; empty if nothing is known."""
        return self.manifest.drift if self.manifest is not None else ""

    @property
    def doubt(self) -> str:
        """Why it may be torn; empty if nobody doubts it."""
        return self.manifest.doubt if self.manifest is not None else ""

    @property
    def caveat(self) -> str:
        """Why restore prefers others: its drift, or a doubt."""
        return self.manifest.caveat if self.manifest is not None else ""

    @property
    def state(self) -> str:
        """`verified` or `durable`; `drifted` if its replicas differed; `doubtful` if it may be torn; `bad` if the
        read-back found damage; `damaged` if manifest or file is not whole.
        """
        if self.manifest is not None and (not self.fault or self.manifest.state is State.BAD):
            return self.manifest.display_state
        return "damaged"


class CatalogListing:
    """One listing of a run, whose manifests are read one by one. Any thread. `is_empty`: no object is at the URL."""

    def __init__(self, store: Store, step: int | None = None) -> None:
        self._store, self._objects = store, store.list()
        self._branches: Branches | None = None
        self._sizes = {info.name: info.nbytes for info in self._objects}
        manifests = manifests_in(self._objects)
        if step is not None:
            manifests = [info for info in manifests if step_of(info.name) == step]
        # A single manifest needs no order, so its attempt is not needed yet.
        first = len(manifests) < 2 or plain_names_are_first(store, self._objects)
        self.manifests = newest_first(store, manifests, plain_names_are_first=first)
        self.is_empty = not self._objects

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def branches(self) -> Branches | None:
        """The branches of the run; None if never rewound. Raises `DamageError` if a rewind's record is unreadable."""
        if self._branches is None and any(info.name.startswith("rewind-") for info in self._objects):
            self._branches = Branches.read(self._store, self._objects)
        return self._branches

    @property
    def current(self) -> Sequence[ListedManifest]:
        """The `manifests` on the line on which training continues. Raises as `branches`."""
        branches = self.branches or Branches()
        return [one for one in self.manifests if branches.is_current(one.order)]

    def items(
        self,
        names: Sequence[ListedManifest] | None = None,
        *,
        progress: Callable[[int], None] = lambda nbytes: None,  # noqa: ARG005
    ) -> Iterator[CatalogItem]:
        """Yield these manifests, or all, in their order; a few are read ahead. `progress`: called with the bytes of
        each, in the calling thread. One that is pruned meanwhile is skipped; one that cannot be opened has that as its
        fault. Raises a retriable `StoreError`.
        """
        todo = deque(self.manifests if names is None else names)
        ahead: deque[tuple[ListedManifest, Future[bytes]]] = deque()
        width, ahead_bytes = 1, 0
        readers = ThreadPoolExecutor(_READERS, thread_name_prefix="catalog")
        try:
            while todo or ahead:
                while todo and len(ahead) < width and (ahead_bytes < _AHEAD_BYTES or not ahead):
                    ahead.append((todo[0], readers.submit(self._read, todo.popleft())))
                    ahead_bytes += ahead[-1][0].nbytes
                listed, read = ahead.popleft()
                item = self._item(listed, read)  # parsed here: parsing threads would only wait for each other
                del read
                ahead_bytes -= listed.nbytes
                progress(listed.nbytes)
                if item is not None:
                    yield item
                del item
                width = min(_READERS, 2 * width)
        finally:
            readers.shutdown(cancel_futures=True)

    @property
    def old_slices(self) -> str:
        """A sentence about steps that exist only as slices of an older holdfast; empty without such steps."""
        return describe_old_slices(self.url, self._objects)

    def _read(self, listed: ListedManifest) -> bytes:
        if listed.nbytes > MANIFEST_BYTES_MAX:
            raise DamageError(
                f"{listed.name}: {listed.nbytes} bytes, a manifest has at most {MANIFEST_BYTES_MAX}; not read"
            )
        return self._store.read(listed.name)

    def _item(self, listed: ListedManifest, read: Future[bytes]) -> CatalogItem | None:
        name, (attempt, step) = listed.name, listed.order
        try:
            manifest = Manifest.from_bytes(read.result(), source=name)
        except DamageError as error:
            return CatalogItem(name, attempt, step, None, str(error), self._data_file_bytes(name))
        except StoreMissing as error:
            if all(info.name != name for info in self._store.list()):  # pruned between listing and reading
                return None
            return self._unreadable_item(listed, error)
        except StoreError as error:
            if error.retriable:
                raise
            return self._unreadable_item(listed, error)
        if manifest_name(manifest.file) != name or manifest.step != step:
            fault = (
                f"{name}: is the manifest of {manifest.file}, step {manifest.step}: it was renamed or copied"
            )
            return CatalogItem(name, attempt, step, None, fault, None)
        file_bytes = self._sizes.get(manifest.file)
        has_proof = proof_name(manifest.file) in self._sizes
        fault = _fault(manifest, file_bytes)
        return CatalogItem(name, manifest.attempt, step, manifest, fault, file_bytes, has_proof=has_proof)

    def _unreadable_item(self, listed: ListedManifest, error: StoreError) -> CatalogItem:
        name, (attempt, step) = listed.name, listed.order
        fault = f"{name}: the store lists it, and it cannot be opened: {error}"
        return CatalogItem(name, attempt, step, None, fault, self._data_file_bytes(name), is_unreadable=True)

    def _data_file_bytes(self, name: str) -> int | None:
        return self._sizes.get(name.removesuffix(".json") + ".pt")


class Catalog:
    """The checkpoints of one run. It keeps no state: each call lists the store. Any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def store(self) -> Store:
        return self._store

    def read_listing(self) -> CatalogListing:
        """List the run. Raises `StoreError`."""
        return CatalogListing(self._store)

    def newest_first(self) -> Iterator[CatalogItem]:
        """Yield every manifest, newest first, each read on demand. Sizes are compared, bytes are not read: restore
        checks every chunk's CRC. An unreadable one without an attempt in its name is placed as the newest attempt.
        """
        return self.read_listing().items()

    def list(self) -> Sequence[CatalogItem]:
        """Like `newest_first`, as a list: for short runs, since a manifest may take megabytes. Raises `StoreError`."""
        return list(self.newest_first())

    def newest_good(self) -> CatalogItem | None:
        """Return the newest checkpoint that restore may use, with a caveat or not. Reads no older manifest."""
        listing = self.read_listing()
        return next((item for item in listing.items(listing.current) if item.is_good), None)

    def highest_good_step(self) -> int | None:
        """Return the highest step that restore may use. Reads from the highest on. Raises as `newest_good`."""
        listing = self.read_listing()
        names = sorted(listing.current, key=lambda listed: (listed.order.step, listed.order), reverse=True)
        return next((item.step for item in listing.items(names) if item.is_good), None)

    def get(self, step: int | None = None) -> Manifest:
        """Return the manifest of `step`, in its newest attempt of the current line, else of any. Without a step, return
        the newest good one, with a warning for each newer one that is not. A requested step is returned even if it is
        bad, so that people can inspect it. Raises `StoreMissing`, which names steps nearby, and `DamageError` if it
        cannot be used.
        """
        if step is not None:
            return self._manifest_of_step(step)
        skipped: list[str] = []
        reasons: list[str] = []
        doubted: tuple[CatalogItem, int] | None = None
        listing = self.read_listing()
        for item in listing.items(listing.current):
            if item.is_good and not item.caveat and item.manifest is not None:
                self._log_skipped(skipped)
                return item.manifest
            if item.is_good and doubted is None:
                doubted = item, len(skipped)
            skipped.append(item.fault or item.caveat)
            reasons.append(f"  {item.name}: {item.fault}")
        if doubted is not None and doubted[0].manifest is not None:
            # A checkpoint that drifted, or may be torn, is better than no checkpoint.
            self._log_skipped(skipped[: doubted[1]])
            _log.warning("%s: used, as there is no other: %s", self._store.url, doubted[0].caveat)
            return doubted[0].manifest
        if reasons:
            lines = "\n".join(reasons)
            raise DamageError(f"{self._store.url}: none of {len(reasons)} checkpoints can be used:\n{lines}")
        if listing.manifests:
            raise DamageError(
                f"{self._store.url}: the run was rewound, and no checkpoint of its current line is left; "
                f"`holdfast rewind {self._store.url} --to` goes back to one of an older branch"
            )
        raise self._nothing_found_error()

    def _manifest_of_step(self, step: int) -> Manifest:
        """Return the manifest of a step, from the current line if it has one. Reads no other step."""
        objects = self._store.list()
        steps = {step_of(info.name) for info in manifests_in(objects)}
        if not steps:
            raise self._nothing_found_error()
        items: list[CatalogItem] = []
        if step in steps:
            listing = CatalogListing(self._store, step)
            branches = listing.branches or Branches()
            items = sorted(listing.items(), key=lambda item: not branches.is_current(item.order))
        if not items:
            near = sorted(steps - {step}, key=lambda other: (abs(other - step), other))
            if not near:  # the only one was pruned meanwhile
                raise self._nothing_found_error()
            names = ", ".join(str(other) for other in sorted(near[:_NEAR_STEPS]))
            raise StoreMissing(f"{self._store.url}: no step {step}; near it: {names}")
        for item in items:
            if item.manifest is not None:
                return item.manifest
        raise DamageError(f"{self._store.url}: step {step}: {items[0].fault}")

    def _log_skipped(self, skipped: Sequence[str]) -> None:
        """Warn of each newer checkpoint that is not used."""
        for reason in skipped:
            _log.warning("%s: a checkpoint is not used: %s", self._store.url, reason)

    def _nothing_found_error(self) -> StoreMissing:
        url = self._store.url
        objects: Sequence[ObjectInfo] = self._store.list()
        if objects:
            old = describe_old_slices(url, objects)
            return StoreMissing(old or f"{url}: there is no checkpoint in this run yet (no step-….json)")
        return StoreMissing(f"{url}: there is nothing at this URL; check the URL")


def _fault(manifest: Manifest, file_bytes: int | None) -> str:
    if manifest.state is State.BAD:
        return f"{manifest.file}: was read back and found bad: {manifest.note or 'no note'}"
    if file_bytes is None:
        return f"{manifest.file}: the file is missing"
    if file_bytes != manifest.image_bytes:
        return f"{manifest.file}: expected {manifest.image_bytes} bytes, the file has {file_bytes}"
    return ""
