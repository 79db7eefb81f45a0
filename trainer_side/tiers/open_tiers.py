"""Opens tiers from the setting `tiers`.

memory  memory:/dir     /dev/shm, or another tmpfs: survives the process, not the machine
pm:/dir                 a DAX file system on persistent memory
nvme:/dir  file:/dir    a local disk, past the page cache or through it
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError
from trainer_side.tiers.first_touch import cores_of_rank
from trainer_side.tiers.medium import CachedFile, DirectFile, MappedFile, Medium, PmFile
from trainer_side.tiers.slot_tier import SlotTier
from trainer_side.tiers.tier import Nearness, Tier
from trainer_side.tiers.tier_directory import TierDirectory, refuse_disk

SLOTS = 2
_SUMMERS_MAX = 6
_MEDIA: dict[Nearness, Callable[[Path], Medium]] = {
    Nearness.MEMORY: MappedFile,
    Nearness.PM: PmFile,
    Nearness.NVME: DirectFile,
    Nearness.FILE: CachedFile,
}
_ALLOWED = "memory, memory:/dir, pm:/dir, nvme:/dir or file:/dir"
_IN_MEMORY = frozenset({Nearness.MEMORY, Nearness.PM})


def open_tiers(config: TrainerConfig, run_url: str) -> list[Tier]:
    """Return the tiers of the setting, in its order, nearest first. ConfigError: an item is not a tier."""
    found: list[Tier] = []
    for spec in config.tiers:
        # A slot in memory costs memory: one, and one for each step in flight. Other devices are measured.
        in_memory = spec.partition(":")[0] in _IN_MEMORY
        slots = config.tier_slots or (config.in_flight_max + 1 if in_memory else None)
        try:
            found.append(open_tier(spec, run_url, slots=slots, writers=config.tier_writers))
        except ConfigError as error:
            raise ConfigError(f"trainer setting tiers: {error}") from error
    return found


def open_tier(spec: str, run_url: str, *, slots: int | None = SLOTS, writers: int | None = None) -> Tier:
    """Return the tier that `spec` names. Nothing on disk is touched before `prepare` or `kept_slices`.

    `slots` is the number of slices that a rank has room for: one, plus one for each checkpoint in flight. `writers` is
    the number of threads that write at once. Without a value, `prepare` measures the device for a second and chooses
    one; a memory tier gets enough writers to keep up with a device, at most half of the cores. ConfigError: `spec` is
    not a tier, or a memory tier lies on a disk and this rank trains on a device.
    """
    kind, colon, directory = spec.partition(":")
    if kind not in _MEDIA:
        raise ConfigError(f"tier {spec!r}: no such kind, expected {_ALLOWED}")
    nearness = Nearness(kind)
    if not colon and nearness is Nearness.MEMORY:
        place = TierDirectory(_own_directory(), run_url, parents=1)
    elif not Path(directory).is_absolute():
        raise ConfigError(
            f"tier {spec!r}: expected an absolute directory after the colon, as in {kind}:/mnt/disk; allowed are "
            f"{_ALLOWED}"
        )
    else:
        place = TierDirectory(Path(directory), run_url)
    if nearness is Nearness.MEMORY:
        refuse_disk(spec, place.base, warn=True)
        # The copy engine itself puts slices there, so the writers only compute CRCs. Nor is the number of slots
        # measured, since each costs memory.
        slots = SLOTS if slots is None else slots
        if writers is None:
            # Each computes CRCs at about 10 GB/s; the other cores are left to training.
            writers = max(1, min(_SUMMERS_MAX, cores_of_rank() // 2))
    return SlotTier(spec, nearness, place, _MEDIA[nearness], slots=slots, writers=writers)


def memory_directory(spec: str) -> Path | None:
    kind, colon, directory = spec.partition(":")
    if kind != Nearness.MEMORY:
        return None
    return Path(directory) if colon else _own_directory()


def _own_directory() -> Path:
    return Path(f"/dev/shm/holdfast-{os.geteuid()}") / "tiers"  # noqa: S108 (0700, owner checked)
