"""The agreement of many ranks on many tensors, at the process that leads it: one round of proposals from the wire.

Ranks differ as in a real job: replicated state is the same on all of them; of split state each holds its shard (FSDP),
or shares it with ranks of other replicas (HSDP). Memory is measured before the last proposal.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Iterator

import numpy as np
import psutil

from holdfast.image.entries import REPLICATED, SPLIT
from holdfast.image.regions import Region
from holdfast.wire.frames import decode
from holdfast.wire.layout_round import LayoutRound
from holdfast.wire.state_messages import Agreement, HeldRegions, Proposal

__all__ = ["STATES", "agree"]

STATES = {"replicated": 0, "split among all ranks": 1, "split, each shard on two ranks": 2}
_WIDTHS = (256, 512, 1024, 2048)


def agree(state: str, ranks: int, tensors: int) -> dict[str, float]:
    """Return CPU seconds from the first PROPOSE to the answer, bytes received, and peak memory meanwhile.

    Args:
        state: One of `STATES`.
        ranks: Number of training ranks.
        tensors: Number of tensors on each rank.
    """
    before_bytes = psutil.Process().memory_info().rss
    seconds, received_bytes, resident_bytes = _round(_frames(STATES[state], ranks, tensors), ranks)
    return {
        "seconds": seconds,
        "received_bytes": received_bytes,
        "kept_bytes": max(0, resident_bytes - before_bytes),
    }


def _round(frames: Iterable[bytes], ranks: int) -> tuple[float, int, int]:
    """Return the leader's CPU seconds, without the making of proposals; bytes received; and bytes resident before the
    last proposal.
    """
    round_, seconds, received_bytes = LayoutRound(ranks, 60.0), 0.0, 0
    resident_bytes = 0
    for rank, message in enumerate(frames):
        received_bytes += len(message)
        if rank == ranks - 1:
            resident_bytes = psutil.Process().memory_info().rss
        begun = time.thread_time()
        answer = round_.propose(rank, round_.read(decode(message)), 0.0)
        seconds += time.thread_time() - begun
    if not isinstance(answer, Agreement):
        raise RuntimeError(f"the ranks did not agree: {answer}")
    begun = time.thread_time()
    answer.to_frame(1)
    return seconds + time.thread_time() - begun, received_bytes, resident_bytes


def _frames(copies: int, ranks: int, tensors: int) -> Iterator[bytes]:
    """Yield each rank's PROPOSE; `copies`: number of ranks that hold each shard, 0 for replicated state."""
    owner = SPLIT if copies else REPLICATED
    rows = [
        [f"model/layers.{number}.weight", "float32", [ranks * 2, _WIDTHS[number % 4]], owner]
        for number in range(tensors)
    ]
    held_rows = tuple((number, number % 4) for number in range(tensors))
    for rank in range(ranks):
        shard = rank // copies if copies else 0
        dice = np.random.default_rng(shard)
        sums = array("I", dice.integers(0, 1 << 32, tensors, np.uint32).tobytes())
        regions = [(4, Region((shard * 2 * copies, 0), (2 * copies, width))) for width in _WIDTHS]
        held = HeldRegions(tuple(regions), held_rows) if copies else HeldRegions()
        yield Proposal("digest", rows, 1000, {"rng": 5000}, sums, held=held).to_frame(1)
