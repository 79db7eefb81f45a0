"""Local tiers: bytes written per byte of state, and speed beside the bare device, by writers; tensors with a separate
mapping against tensors between headers (LightCheck fig. 11).

Persistent memory is a stand-in here, a file on `/dev/shm` that libpmem is told to take for it (`PMEM_IS_PMEM_FORCE=1`)
where libpmem is installed: its stores and fences are the real ones, its speed is that of plain memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.cluster import turn
from benchmarks.experiments import Options, document
from benchmarks.grid import Grid
from benchmarks.interleaving import Layouts
from benchmarks.raw_direct import DirectWriter
from benchmarks.spread import ratios, spread
from benchmarks.tier_writing import Counting, Slice, layout_of
from trainer_side.tiers.medium import CachedFile, DirectFile, MappedFile, Medium, PmFile
from trainer_side.tiers.slot_tier import SlotTier
from trainer_side.tiers.tier import Nearness
from trainer_side.tiers.tier_directory import TierDirectory

__all__ = ["RAW", "grids", "measure"]

_ROUNDS = 5
_RANKS = 2
_WRITERS = (1, 2, 4)
RAW = "raw O_DIRECT, the same file again"
_MEDIA: dict[Nearness, Callable[[Path], Medium]] = {
    Nearness.MEMORY: MappedFile,
    Nearness.PM: PmFile,
    Nearness.NVME: DirectFile,
    Nearness.FILE: CachedFile,
}
_SHARED_MEMORY = Path("/dev/shm")


def measure(options: Options) -> dict[str, Any]:
    shape = options.shape("gpt2").fitted()
    options.progress(f"laying out {shape.model}")
    slice_ = Slice(layout_of(shape.model, ranks=_RANKS, chunk_bytes=shape.chunk_bytes))
    rounds: list[dict[str, Any]] = [{} for _ in range(options.rounds_of(_ROUNDS))]
    how: dict[str, str] = {}
    with _places(options) as (memory, disk), _stand_in():
        tiers: dict[str, tuple[SlotTier, list[Counting], int]] = {}
        for nearness in _MEDIA:
            folder = memory if nearness in {Nearness.MEMORY, Nearness.PM} else disk
            for writers in _WRITERS:
                tier, media = _tier(nearness, folder / f"{nearness}-{writers}", writers)
                tiers[f"{nearness}, {writers}"] = (tier, media, writers)
        raw = DirectWriter(disk, slice_.nbytes, shape.chunk_bytes)
        with contextlib.closing(raw):
            for name, (tier, media, writers) in tiers.items():
                options.progress(f"warming up {name}")
                with _prepared(tier, slice_):
                    how[name] = tier.write_mode
                    for _ in range(2):  # each slot is touched once
                        slice_.write(tier, writers)
                    for number, figures in enumerate(rounds):
                        for what in turn((name, RAW), number):
                            if what == RAW:
                                seconds = min(raw.write(count, truncate=False) for count in (1, 2))
                                figures[f"raw beside {name}"] = {"seconds": seconds}
                            else:
                                figures[name] = _written(tier, media, slice_, writers)
        layouts = {}
        for model in (shape.model, "flat-10000-64")[: options.count(2, 1)]:
            options.progress(f"layouts: {model}")
            layouts[model] = Layouts(model, memory).measure(options.rounds_of(_ROUNDS))
    return document(
        "tiers", options, shape, slice_bytes=slice_.nbytes, rounds=rounds, how=how, layouts=layouts
    )


@contextlib.contextmanager
def _places(options: Options) -> Iterator[tuple[Path, Path]]:
    memory = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=_SHARED_MEMORY))
    disk = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=options.folder))
    try:
        yield memory, disk
    finally:
        shutil.rmtree(memory, ignore_errors=True)
        shutil.rmtree(disk, ignore_errors=True)


@contextlib.contextmanager
def _stand_in() -> Iterator[None]:
    before = os.environ.get("PMEM_IS_PMEM_FORCE")
    os.environ["PMEM_IS_PMEM_FORCE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PMEM_IS_PMEM_FORCE"]
        else:
            os.environ["PMEM_IS_PMEM_FORCE"] = before


def _tier(nearness: Nearness, folder: Path, writers: int) -> tuple[SlotTier, list[Counting]]:
    folder.mkdir()
    media: list[Counting] = []

    def counting(path: Path) -> Counting:
        media.append(Counting(_MEDIA[nearness](path)))
        return media[-1]

    place = TierDirectory(folder, "file:///bench/run")
    return SlotTier(f"{nearness}:{folder}", nearness, place, counting, slots=2, writers=writers), media


@contextlib.contextmanager
def _prepared(tier: SlotTier, slice_: Slice) -> Iterator[None]:
    """Keep the tier's file only during the block: the files of all tiers together would not fit."""
    tier.prepare(slice_.layout, slice_.rank)
    places = {Path(kept.place).parent for kept in tier.kept_slices()}
    try:
        yield
        places |= {Path(kept.place).parent for kept in tier.kept_slices()}
    finally:
        tier.close()
        for place in places:
            shutil.rmtree(place, ignore_errors=True)


def _written(tier: SlotTier, media: list[Counting], slice_: Slice, writers: int) -> dict[str, float]:
    before = sum(medium.nbytes for medium in media)
    seconds = slice_.write(tier, writers)
    nbytes = sum(medium.nbytes for medium in media) - before
    return {"seconds": seconds, "written_bytes": float(nbytes), "amplification": nbytes / slice_.nbytes}


def grids(document: dict[str, Any]) -> list[Grid]:
    slice_bytes, rounds = document["slice_bytes"], document["rounds"]
    rows = []
    for name, how in document["how"].items():
        seconds = [figures[name]["seconds"] for figures in rounds]
        raw = [figures[f"raw beside {name}"]["seconds"] for figures in rounds]
        amplification = spread([figures[name]["amplification"] for figures in rounds])
        rows.append(
            (
                name,
                how.rpartition(",")[0],
                spread(seconds).text(3),
                f"{slice_bytes / 1e9 / spread(seconds).median:.2f}",
                f"{ratios(raw, seconds).text(0, times=100)} %",
                f"{amplification.median:.4f}",
            )
        )
    title = f"One rank's slice of {slice_bytes / 1e9:.2f} GB, from memory until it is sealed"
    names = (
        "tier, writers",
        "how",
        "seconds",
        "GB/s",
        "of a bare O_DIRECT write's bandwidth",
        "bytes written per byte",
    )
    result = [Grid(title, names, tuple(rows))]
    lines = []
    for model, of in document["layouts"].items():
        for what in ("save_seconds", "load_seconds"):
            apart = [figures["apart"][what] for figures in of["rounds"]]
            between = [figures["interleaved"][what] for figures in of["rounds"]]
            lines.append(
                (
                    f"{model}: {of['tensors']} tensors, {of['nbytes'] / 1e9:.2f} GB",
                    what.removesuffix("_seconds"),
                    spread(apart).text(1, times=1000),
                    spread(between).text(1, times=1000),
                    ratios(between, apart).text(2),
                )
            )
    copied = next(iter(document["layouts"].values()))["how"]
    title = f"Mapping apart from the tensors against headers between them, ms; copied by {copied}"
    ways = ("state", "way", "apart", "interleaved", "times as long")
    result.append(Grid(title, ways, tuple(lines)))
    return result
