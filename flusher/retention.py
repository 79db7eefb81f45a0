"""Which checkpoints of a run may go. A pure rule: the service deletes, manifest first, then the file.

    kept:   the newest `keep_last` good ones · every step that `keep_every` divides · the newest verified
        one, always · the newest whose replicas are not known to have drifted apart, always
    goes:   the good ones beyond that · bad ones older than the newest good one

Good is verified or durable. A bad one newer than all the good ones stays: it is the evidence of what just
went wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from holdfast.image.manifest import Manifest, State


@dataclass(frozen=True, slots=True)
class StoredStep:
    """What is remembered of a checkpoint in the store. Not its manifest: that names every tensor, and a run may keep
    all of its checkpoints.
    """

    attempt: int
    step: int
    file: str
    state: State
    write_id: str
    is_drifted: bool = False

    @property
    def order(self) -> tuple[int, int]:
        """Newer checkpoints have a higher one."""
        return (self.attempt, self.step)

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """The same, of a manifest."""
        return cls(
            manifest.attempt,
            manifest.step,
            manifest.file,
            manifest.state,
            manifest.write_id,
            manifest.is_drifted,
        )


def to_remove(known: Sequence[StoredStep], *, keep_last: int, keep_every: int) -> list[StoredStep]:
    """Those of `known` that need not be kept, oldest first.

    Args:
        known: All whose manifests are readable, in any order.
        keep_last: How many of the newest good ones to keep; 0 keeps all, bad ones too.
        keep_every: Keep good ones whose step this divides as well; 0 is off.

    Raises:
        ValueError: A negative number.
    """
    if keep_last < 0 or keep_every < 0:
        raise ValueError(f"keep_last and keep_every must not be negative, got {keep_last} and {keep_every}")
    if keep_last == 0:
        return []
    newest_first = sorted(known, key=lambda one: one.order, reverse=True)
    good = [one for one in newest_first if one.state is not State.BAD]
    if not good:
        return []
    kept = {one.file for one in good[:keep_last]}
    kept.update(one.file for one in good if keep_every and one.step % keep_every == 0)
    # A durable one is good until it is read back; until then this one is what a restore can be sure of.
    kept.update([one.file for one in good if one.state is State.VERIFIED][:1])
    kept.update([one.file for one in good if not one.is_drifted][:1])
    kept.update(one.file for one in newest_first if one.order > good[0].order)
    return [one for one in reversed(newest_first) if one.file not in kept]
