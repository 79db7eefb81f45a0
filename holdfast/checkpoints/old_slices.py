"""Slices that the ranks of an older holdfast wrote to the store. They are found by their names, never read or removed.

    RUN/slices/step-000000123-a002-r00001of00004.slice, ….seal.json

They are not checkpoints. Their attempts count, so that no later attempt gets the same number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from holdfast.checkpoints.manifest_order import manifests_in, step_of
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.store.base import ObjectInfo

_SLICE = re.compile(r"slices/step-(\d{9,19})-a(\d{3,18})-r\d{5,10}of\d{5,10}(?:\.slice|\.seal\.json)")


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
