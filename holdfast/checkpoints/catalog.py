"""The list of the checkpoints of a run, newest first. It reads manifests only; `verification.py` reads the bytes.

    list()      every manifest, readable or not; why it cannot be used    `holdfast ls`, restore
    get(step)   one of them, by its step or the newest good one           `holdfast inspect|verify|pull URL@STEP`

Newest is the highest (attempt, step), never a time. A file without a manifest is not a checkpoint and is not
listed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from holdfast.checkpoints.slice_sets import SliceSet, complete_sets, find_sets
from holdfast.errors import DamageError, StoreMissing
from holdfast.image.manifest import MANIFEST_BYTES_MAX, Manifest, State, is_manifest_name, manifest_name
from holdfast.store.base import ObjectInfo, Store

_log = logging.getLogger("holdfast.catalog")

_NAME = re.compile(r"step-(\d+)(?:-a(\d+))?\.json")
# a manifest is one small request: a long run on S3 would otherwise be listed one round trip at a time
_READERS = 8
_NEAR_STEPS = 5


@dataclass(frozen=True, slots=True)
class CatalogItem:
    """One manifest of the run, readable or not.

    Attributes:
        name: Name of the manifest's object.
        step: The step, from the name.
        manifest: What it says; None when it cannot be read.
        fault: Why restore does not use it, for people; empty when it may.
        file_bytes: Size of the portable file in the store; None when there is none.
    """

    name: str
    step: int
    manifest: Manifest | None
    fault: str
    file_bytes: int | None

    @property
    def drift(self) -> str:
        """In what its replicas were not the same; empty as far as is known."""
        return self.manifest.drift if self.manifest is not None else ""

    @property
    def state(self) -> str:
        """`verified` or `durable`; `drifted` if the replicas that it was put together of were not the same; `bad` if it
        was read back and found so; `damaged` if manifest or file is not whole.
        """
        if self.manifest is not None and (not self.fault or self.manifest.state is State.BAD):
            return "drifted" if self.manifest.is_drifted else self.manifest.state.value
        return "damaged"


class Catalog:
    """The checkpoints of one run. Holds no state but the store: each call looks anew. May be used from any
    thread.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def store(self) -> Store:
        return self._store

    def list(self) -> Sequence[CatalogItem]:
        """Every manifest, newest first. One that cannot be read stands where the newest attempt would have
        put it.

        Sizes are compared, bytes are not read: restore checks every chunk's CRC as it reads.

        Raises:
            StoreError: The store failed. That one manifest is damaged or vanishes meanwhile is no error.
        """
        objects = self._store.list()
        return self._items(self._manifests(objects), objects)

    def _items(self, wanted: Sequence[ObjectInfo], objects: Sequence[ObjectInfo]) -> Sequence[CatalogItem]:
        sizes = {info.name: info.nbytes for info in objects}
        with ThreadPoolExecutor(_READERS, thread_name_prefix="catalog") as readers:
            found = readers.map(lambda info: self._item(info, sizes), wanted)
            items = [item for item in found if item is not None]
        newest = max((item.manifest.attempt for item in items if item.manifest), default=0)

        def order(item: CatalogItem) -> tuple[int, int]:
            return item.manifest.order if item.manifest else (newest, item.step)

        return sorted(items, key=order, reverse=True)

    def get(self, step: int | None = None) -> Manifest:
        """The manifest of `step`, in its newest attempt; or without a step the newest good one, with a warning for
        each newer one that is not.

        A step that is asked for by number is given even if its state is bad: people want to look at it.

        Raises:
            StoreMissing: No run, no checkpoint in it, or no such step; names the steps that are near.
            DamageError: There is one, but it cannot be used.
        """
        if step is not None:
            return self._of_step(step)
        items = self.list()
        if items:
            # One whose ranks did not agree is better than none.
            for item in sorted(items, key=lambda item: item.state == "drifted"):
                if item.manifest is not None and not item.fault:
                    self._say_passed(items, item)
                    return item.manifest
            reasons = "\n".join(f"  {item.name}: {item.fault}" for item in items)
            raise DamageError(f"{self._store.url}: none of {len(items)} checkpoints can be used:\n{reasons}")
        raise self._nothing()

    def _of_step(self, step: int) -> Manifest:
        """The same for a step that is asked for by number: of the other steps no manifest is read."""
        objects = self._store.list()
        steps = {info.name: _step(info.name) for info in self._manifests(objects)}
        if not steps:
            raise self._nothing()
        items = self._items([info for info in objects if steps.get(info.name) == step], objects)
        if not items:
            if any(found.step == step for found in complete_sets(find_sets(objects))):
                raise StoreMissing(
                    f"{self._store.url}: step {step} is there as slices, not as a file; `holdfast pull` can fetch it "
                    f"as it is, and `holdfast assemble {self._store.url}@{step}` makes a file of it"
                )
            near = sorted({*steps.values()} - {step}, key=lambda other: (abs(other - step), other))
            if not near:  # the only one was pruned meanwhile
                raise self._nothing()
            names = ", ".join(str(other) for other in sorted(near[:_NEAR_STEPS]))
            raise StoreMissing(f"{self._store.url}: no step {step}; near it: {names}")
        for item in items:
            if item.manifest is not None:
                return item.manifest
        raise DamageError(f"{self._store.url}: step {step}: {items[0].fault}")

    def slices(self) -> Sequence[SliceSet]:
        """What ranks wrote to the store themselves and is no file yet, newest first; by name, nothing is read.

        Raises:
            StoreError: The store failed.
        """
        return find_sets(self._store.list())

    def _say_passed(self, items: Sequence[CatalogItem], chosen: CatalogItem) -> None:
        """Name the newer ones that are not used; of the chosen one, that its ranks did not agree."""
        for item in items[: items.index(chosen)]:
            _log.warning("%s: a checkpoint is not used: %s", self._store.url, item.fault or item.drift)
        if chosen.drift:
            _log.warning("%s: used, as there is no other: %s", self._store.url, chosen.drift)

    def _nothing(self) -> StoreMissing:
        url = self._store.url
        objects = self._store.list()
        sets = complete_sets(find_sets(objects))
        if sets:
            return StoreMissing(
                f"{url}: there is no file yet, only slices that ranks wrote themselves (newest: step {sets[0].step}); "
                f"`holdfast assemble {url}` makes a file of them"
            )
        if objects:
            return StoreMissing(f"{url}: there is no checkpoint in this run yet (no step-….json)")
        return StoreMissing(f"{url}: there is nothing at this URL; check the URL")

    @staticmethod
    def _manifests(objects: Sequence[ObjectInfo]) -> Sequence[ObjectInfo]:
        return [info for info in objects if is_manifest_name(info.name)]

    def _item(self, info: ObjectInfo, sizes: dict[str, int]) -> CatalogItem | None:
        name = info.name
        step = _step(name)
        if info.nbytes > MANIFEST_BYTES_MAX:
            fault = f"{name}: {info.nbytes} bytes, a manifest has at most {MANIFEST_BYTES_MAX}; not read"
            return CatalogItem(name, step, None, fault, sizes.get(name.removesuffix(".json") + ".pt"))
        try:
            manifest = Manifest.from_bytes(self._store.read(name), source=name)
        except DamageError as error:
            return CatalogItem(name, step, None, str(error), sizes.get(name.removesuffix(".json") + ".pt"))
        except StoreMissing:  # pruned between listing and reading
            return None
        if manifest_name(manifest.file) != name or manifest.step != step:
            fault = (
                f"{name}: is the manifest of {manifest.file}, step {manifest.step}: it was renamed or copied"
            )
            return CatalogItem(name, step, None, fault, None)
        file_bytes = sizes.get(manifest.file)
        return CatalogItem(name, step, manifest, _fault(manifest, file_bytes), file_bytes)


def _step(name: str) -> int:
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return int(match[1])


def _fault(manifest: Manifest, file_bytes: int | None) -> str:
    if manifest.state is State.BAD:
        return f"{manifest.file}: was read back and found bad: {manifest.note or 'no note'}"
    if file_bytes is None:
        return f"{manifest.file}: the file is missing"
    if file_bytes != manifest.image_bytes:
        return f"{manifest.file}: expected {manifest.image_bytes} bytes, the file has {file_bytes}"
    return ""
