"""Which checkpoints of a run may go. A pure rule: the service deletes, manifest first, then the file.

    kept:   the newest `keep_last` good ones · every step that `keep_every` divides · the newest verified
        one, always
    goes:   the good ones beyond that · bad ones older than the newest good one

Good is verified or durable. A bad one newer than all the good ones stays: it is the evidence of what just
went wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.manifest import Manifest, State

__all__ = ["to_remove"]


def to_remove(manifests: Sequence[Manifest], *, keep_last: int, keep_every: int) -> list[Manifest]:
    """The manifests of `manifests` that need not be kept, oldest first.

    Args:
        manifests: All readable ones of the run, in any order.
        keep_last: How many of the newest good ones to keep; 0 keeps all, bad ones too.
        keep_every: Keep good ones whose step this divides as well; 0 is off.

    Raises:
        ValueError: A negative number.
    """
    if keep_last < 0 or keep_every < 0:
        raise ValueError(f"keep_last and keep_every must not be negative, got {keep_last} and {keep_every}")
    if keep_last == 0:
        return []
    newest_first = sorted(manifests, key=lambda manifest: manifest.order, reverse=True)
    good = [manifest for manifest in newest_first if manifest.state is not State.BAD]
    if not good:
        return []
    kept = {manifest.file for manifest in good[:keep_last]}
    kept.update(manifest.file for manifest in good if keep_every and manifest.step % keep_every == 0)
    # A durable one is good until it is read back; until then this one is what a restore can be sure of.
    kept.update([manifest.file for manifest in good if manifest.state is State.VERIFIED][:1])
    kept.update(manifest.file for manifest in newest_first if manifest.order > good[0].order)
    return [manifest for manifest in reversed(newest_first) if manifest.file not in kept]
