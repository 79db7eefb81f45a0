"""LightCheck's fig. 11 (ICCD 2023): all tensors in one region with a separate mapping, or each behind its header.

    apart         │ mapping: written once │ tensor │ tensor │ tensor │ …      each on a cache line
    interleaved   │ header │ tensor │ header │ tensor │ …                     packed, headers written every time

Both lie in a mapping of shared memory; libpmem's copy writes them where it is installed, else memcpy. An interleaved
state is read front to back: each header gives the place of the next one.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import struct
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.tier_writing import layout_of
from holdfast.image.layout import CHUNK_BYTES
from trainer_side.tiers.first_touch import huge_buffer
from trainer_side.tiers.medium import address_of, load_libpmem

__all__ = ["Layouts"]

_HEADER = struct.Struct("<4sIQQ40s")  # magic, number, bytes, step, name
_MAGIC = b"TNSR"
_LINE_BYTES = 64


class Layouts:
    """One state, written and read back in both layouts.

    Args:
        model: See `benchmarks.workload`.
    """

    def __init__(self, model: str, folder: Path) -> None:
        entries = layout_of(model, ranks=1, chunk_bytes=CHUNK_BYTES).entries
        self._sizes = [entry.nbytes for entry in entries if entry.nbytes]
        self._names = [entry.name.encode()[-40:] for entry in entries if entry.nbytes]
        self._source = huge_buffer(sum(self._sizes))
        self._source.random_(0, 256)
        self._back = huge_buffer(sum(self._sizes))
        self._path = folder / "layout.bin"
        self._pmem = load_libpmem()

    def measure(self, rounds: int) -> dict[str, Any]:
        """Return seconds of saving and loading in both layouts by round; all pages were touched before."""
        copy = ctypes.memmove if self._pmem is None else self._pmem.copy
        apart, interleaved = self._map("apart"), self._map("interleaved")
        ways: dict[str, tuple[Callable[[Any, int], None], Callable[[], None]]] = {
            "apart": (lambda how, _: self._save_apart(apart, how), lambda: self._load_apart(apart)),
            "interleaved": (
                lambda how, step: self._save_interleaved(interleaved, how, step),
                lambda: self._load_interleaved(interleaved),
            ),
        }
        found = []
        for number in range(rounds + 1):
            figures = {}
            for way in sorted(ways, reverse=bool(number % 2)):
                save, load = ways[way]
                begun = time.monotonic()
                save(copy, number)
                saved = time.monotonic()
                load()
                figures[way] = {"save_seconds": saved - begun, "load_seconds": time.monotonic() - saved}
                if not self._source.equal(self._back):
                    raise RuntimeError(f"{way}: what was read is not what was written")
                self._back.zero_()
            found.append(figures)
        apart.release()
        interleaved.release()
        return {
            "rounds": found[1:],
            "tensors": len(self._sizes),
            "nbytes": sum(self._sizes),
            "how": "memcpy" if self._pmem is None else "libpmem",
        }

    def _map(self, way: str) -> memoryview:
        nbytes = sum(size + _HEADER.size + _LINE_BYTES for size in self._sizes)
        path = self._path.with_suffix(f".{way}")
        with path.open("w+b") as file:
            file.truncate(nbytes)
            mapped = mmap.mmap(file.fileno(), nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        path.unlink()
        return memoryview(mapped)

    def _sources(self, base: int) -> list[int]:
        return list(itertools.accumulate(self._sizes[:-1], initial=base))

    def _places(self, base: int) -> list[int]:
        lines = [-(-size // _LINE_BYTES) * _LINE_BYTES for size in self._sizes]
        return list(itertools.accumulate(lines[:-1], initial=base))

    def _drain(self) -> None:
        if self._pmem is not None:
            self._pmem.drain()

    def _save_apart(self, region: memoryview, copy: Callable[[int, int, int], object]) -> None:
        sources = self._sources(self._source.data_ptr())
        deque(map(copy, self._places(address_of(region)), sources, self._sizes), maxlen=0)
        self._drain()

    def _load_apart(self, region: memoryview) -> None:
        targets = self._sources(self._back.data_ptr())
        deque(map(ctypes.memmove, targets, self._places(address_of(region)), self._sizes), maxlen=0)

    def _save_interleaved(
        self, region: memoryview, copy: Callable[[int, int, int], object], step: int
    ) -> None:
        headers = bytearray(_HEADER.size * len(self._sizes))
        for number, (name, size) in enumerate(zip(self._names, self._sizes, strict=True)):
            _HEADER.pack_into(headers, number * _HEADER.size, _MAGIC, number, size, step, name)
        header, source, place = address_of(memoryview(headers)), self._source.data_ptr(), address_of(region)
        for size in self._sizes:
            copy(place, header, _HEADER.size)
            copy(place + _HEADER.size, source, size)
            place, source, header = place + _HEADER.size + size, source + size, header + _HEADER.size
        self._drain()

    def _load_interleaved(self, region: memoryview) -> None:
        at, base, target = 0, address_of(region), self._back.data_ptr()
        for _ in self._sizes:
            magic, _, size, _, _ = _HEADER.unpack_from(region, at)
            if magic != _MAGIC:
                raise RuntimeError(f"no header at {at}")
            ctypes.memmove(target, base + at + _HEADER.size, size)
            at, target = at + _HEADER.size + size, target + size
