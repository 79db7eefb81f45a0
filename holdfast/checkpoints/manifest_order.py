"""The manifests of a listing, newest first, without reading them whole.

    step-000000123-a002.json    the name says the attempt
    step-000000123.json         of attempt 1, if the claim says so; else the manifest's first bytes say the attempt

Older versions gave later attempts the plain name, too. In a run that one of them may have written, the first bytes of
each plain manifest are read: a small request, without parsing. They only decide the order in which manifests are read:
each is checked whole before it is used.

Slices that the ranks of an older holdfast left under `slices/` are found by their names, and never read or removed.
They are not checkpoints, but their attempts count, so that no later attempt gets the same number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from holdfast.errors import DamageError, StoreError, StoreMissing
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.manifest import Manifest, is_manifest_name
from holdfast.store.base import ObjectInfo, Store

_NAME = re.compile(r"step-(\d+)(?:-a(\d+))?\.json")
_HEAD = re.compile(rb'\{"format":"[^"\\]*","run":"(?:[^"\\]|\\.)*","attempt":([1-9]\d{0,17}),')
_SLICE = re.compile(r"slices/step-(\d{9,19})-a(\d{3,18})-r\d{5,10}of\d{5,10}(?:\.slice|\.seal\.json)")
_HEAD_BYTES = 4096
_SMALL_BYTES = 1 << 16
_WHOLE_BYTES_MAX = 1 << 22  # of a manifest with another tool's formatting, which is read whole
# each is one small request: a long run on S3 would otherwise take one round trip after the other
_READERS = 16


class ListedManifest(NamedTuple):
    """One manifest of a listing. An unknown attempt counts as the newest of all."""

    order: CheckpointId
    name: str
    nbytes: int


def manifests_in(objects: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """Return the manifests in a listing of the run."""
    return [info for info in objects if is_manifest_name(info.name)]


def step_of(name: str) -> int:
    """Return the step in the name of a manifest."""
    return _parse_name(name)[0]


def newest_first(
    store: Store, objects: Sequence[ObjectInfo], *, plain_names_are_first: bool
) -> Sequence[ListedManifest]:
    """Return the manifests in a listing, newest first. `plain_names_are_first`: as in `lease`."""
    listed = manifests_in(objects)
    attempts: dict[str, int | None] = {}
    unknown = []
    for info in listed:
        attempt = _parse_name(info.name)[1]
        if attempt is None and not plain_names_are_first:
            unknown.append(info)
        else:
            attempts[info.name] = attempt or 1
    with ThreadPoolExecutor(_READERS, thread_name_prefix="catalog") as readers:
        stated = readers.map(partial(_read_attempt, store), unknown)
        attempts |= zip((info.name for info in unknown), stated, strict=True)
    newest = max((attempt for attempt in attempts.values() if attempt is not None), default=0)
    found = [
        ListedManifest(
            CheckpointId(newest if (known := attempts[info.name]) is None else known, step_of(info.name)),
            *info,
        )
        for info in listed
    ]
    return sorted(found, reverse=True)


def _parse_name(name: str) -> tuple[int, int | None]:
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return int(match[1]), None if match[2] is None else int(match[2])


def _read_attempt(store: Store, info: ObjectInfo) -> int | None:
    """Return the attempt that the manifest states; None if it is gone or cannot be read."""
    try:
        if info.nbytes <= _SMALL_BYTES:  # as cheap
            head = store.read(info.name, _SMALL_BYTES)
        else:
            begin = bytearray(_HEAD_BYTES)
            store.read_into(info.name, 0, memoryview(begin))
            head = bytes(begin)
        match = _HEAD.match(head)
        if match is not None:
            return int(match[1])
        return Manifest.from_bytes(store.read(info.name, _WHOLE_BYTES_MAX), source=info.name).attempt
    except (DamageError, StoreMissing):
        return None
    except StoreError as error:
        if error.retriable:
            raise
        return None


def old_slices(objects: Iterable[ObjectInfo]) -> list[CheckpointId]:
    """Return the checkpoints that have slices in this listing of the run, newest first."""
    found = (_SLICE.fullmatch(info.name) for info in objects)
    return sorted({CheckpointId(int(one[2]), int(one[1])) for one in found if one}, reverse=True)


def describe_old_slices(url: str, objects: Iterable[ObjectInfo]) -> str:
    """Return a sentence about steps that the run has only as such slices; empty without such steps."""
    listed = list(objects)
    published = {step_of(info.name) for info in manifests_in(listed)}
    steps = sorted({one.step for one in old_slices(listed)} - published)
    if not steps:
        return ""
    return (
        f"{url}: this run has {len(steps)} step{'s' if len(steps) > 1 else ''} only as slices written by an older "
        f"holdfast (the newest: step {steps[-1]}). They are no checkpoints, and nothing restores or removes them: let "
        f"the command `assemble` of that version make files of them, or remove {url}/slices/"
    )
