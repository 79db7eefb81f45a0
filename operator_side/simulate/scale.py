"""Costs of a checkpoint at a size too large to test: memory and network of the stager.

    Shape, rates in and out, memory ─► RingSize: how large, and when the whole checkpoint is staged
    Machine                         ─► how often one stager can receive a whole image

Computed from the rules of docs/wire.md and docs/ring.md, not measured. The stager receives and sends each checkpoint
whole. A network card does both at the same time, so the slower of card and store limits the rate of checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.errors import ConfigError

_GIB = 1 << 30
_BITS = 8
_BESIDE_RING_BYTES = _GIB  # docs/stager.md: for processes and system
_JOURNAL_HEADER_BYTES, _JOURNAL_RECORD_BYTES = 4096, 8192  # docs/ring.md
_RING_CHUNKS_MIN = 8  # holdfast.config
_PARTS_MAX = 10_000  # of a file in S3; a ring must hold one part


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a job; `chunk_bytes` as in the settings."""

    ranks: int
    image_bytes: int
    chunk_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        for name in ("ranks", "image_bytes", "chunk_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}")

    @property
    def chunks(self) -> int:
        return -(-self.image_bytes // self.chunk_bytes)


def part_bytes_min(shape: Shape) -> int:
    """Return the smallest size of a part in S3 for a file of this size, in whole chunks."""
    return -(-shape.image_bytes // (_PARTS_MAX * shape.chunk_bytes)) * shape.chunk_bytes


# -- the ring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RingSize:
    ring_bytes: int  # in whole chunks
    staged_seconds: float  # from the first byte until a checkpoint is staged
    images: int  # whole images that it holds: 2, 1 or 0
    journal_bytes: int  # size of its journal, in the same shared memory


def staged_seconds(image_bytes: int, ring_bytes: int, in_rate: float, out_rate: float) -> float:
    """Return the time until an image is staged, given bytes per second in and out; bytes that find no room wait."""
    return max(image_bytes / in_rate, (image_bytes - ring_bytes) / out_rate)


def best_ring(shape: Shape, *, in_rate: float, out_rate: float, memory_bytes: int) -> RingSize:
    """Choose the ring for a stager with `memory_bytes`: two images if they fit (the next arrives while a slow store
    takes the last, and a restart finds one whole), else one, else all the memory. Raises `ConfigError`: a rate is not
    positive, or the smallest ring does not fit.
    """
    for name, rate in (("into the stager", in_rate), ("into the store", out_rate)):
        if not 0 < rate < math.inf:
            raise ConfigError(f"bytes per second {name}: expected more than 0, got {rate:g}")
    chunk = shape.chunk_bytes
    room_chunks = (memory_bytes - _BESIDE_RING_BYTES - _JOURNAL_HEADER_BYTES) // (
        chunk + _JOURNAL_RECORD_BYTES
    )
    least_chunks = max(_RING_CHUNKS_MIN, part_bytes_min(shape) // chunk)
    if room_chunks < least_chunks:
        raise ConfigError(
            f"a stager with {memory_bytes} bytes of memory: expected room for a ring of {least_chunks} chunks of "
            f"{chunk} bytes and 1 GiB beside it, at least {least_chunks * chunk + _BESIDE_RING_BYTES} bytes; take a "
            "larger machine, or smaller chunks"
        )
    images = next((times for times in (2, 1) if times * shape.chunks <= room_chunks), 0)
    chunks = max(least_chunks, images * shape.chunks if images else room_chunks)
    seconds = staged_seconds(shape.image_bytes, chunks * chunk, in_rate, out_rate)
    return RingSize(chunks * chunk, seconds, images, _JOURNAL_HEADER_BYTES + chunks * _JOURNAL_RECORD_BYTES)


# -- the stager's machine --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Machine:
    """A type of machine on AWS; `gigabits` are sustained per second, each way."""

    name: str
    gigabits: int
    memory_bytes: int

    @property
    def rate(self) -> float:
        """Bytes per second, each way."""
        return self.gigabits * 1e9 / _BITS


STAGERS_SOURCE = (
    "AWS, Specifications for Amazon EC2 compute optimized instances; not tested here: compare with "
    "`aws ec2 describe-instance-types`"
)
# Only sizes whose bandwidth AWS states without "up to": that would be a burst (docs/stager.md).
STAGERS = (
    Machine("c7gn.4xlarge", 50, 32 * _GIB),
    Machine("c7gn.8xlarge", 100, 64 * _GIB),
    Machine("c7gn.12xlarge", 150, 96 * _GIB),
    Machine("c7gn.16xlarge", 200, 128 * _GIB),
)


def find_machine(name: str) -> Machine:
    """Look up a machine by name. Raises `ConfigError`: the table does not have it."""
    for one in STAGERS:
        if one.name == name:
            return one
    raise ConfigError(
        f"stager type {name}: expected one of {', '.join(one.name for one in STAGERS)}; for another one give its "
        "memory and its network instead"
    )


def stagers_needed(
    image_bytes: int, interval_seconds: float, one: Machine, store_rate: float = math.inf
) -> int:
    """Return how many such machines receive an image per interval, at `store_rate` each. A run has one stager."""
    if not 0 < interval_seconds < math.inf:
        raise ConfigError(f"interval: expected more than 0 s, got {interval_seconds:g}")
    return math.ceil(image_bytes / (interval_seconds * min(one.rate, store_rate)))


def smallest_machine(
    image_bytes: int, interval_seconds: float, store_rate: float = math.inf
) -> Machine | None:
    """Return the smallest machine that is fast enough, preferably with memory for one image; None: none is."""
    fast = [one for one in STAGERS if stagers_needed(image_bytes, interval_seconds, one, store_rate) == 1]
    roomy = [one for one in fast if one.memory_bytes - _BESIDE_RING_BYTES >= image_bytes]
    return next(iter(roomy or fast), None)
