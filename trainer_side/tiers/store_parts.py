"""A slice on its way into an upload: frames, in any order and from any thread, become parts of one size.

frames   │ 0   │ 1      │ 2 │ 3              │
parts    │ 0       │ 1        │ 2       │ 3  │      a part within one frame goes from the caller's memory;
▲ joined   ▲ joined                    one that several frames share is joined first
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from holdfast.crc import crc32
from holdfast.image.slices import Frame

__all__ = ["PartCutter"]


@dataclass(slots=True)
class _Joined:
    """A part that several frames share, until all of them have come."""

    memory: memoryview
    lacks: set[int] = field(default_factory=set)


class PartCutter:
    """Cuts frames into parts and sends each as soon as it is whole, in the thread that made it so.

    Frames that come nearly in order keep a part or two of memory for each thread; in a wild order it may be up to the
    whole slice.

    Args:
        frames: Of the slice.
        part_bytes: Size of every part but the last.
        send: Writes part `index` with these bytes and this CRC-32. Any thread; what it raises, `put` raises.
    """

    def __init__(
        self, frames: Sequence[Frame], part_bytes: int, send: Callable[[int, memoryview, int], None]
    ) -> None:
        self._frames, self._part_bytes, self._send = frames, part_bytes, send
        self._total_bytes = frames[-1].offset + frames[-1].padded_bytes if frames else 0
        self._shared: dict[int, set[int]] = {}  # part → the frames that share it
        for number, frame in enumerate(frames):
            for part in self._parts(frame):
                self._shared.setdefault(part, set()).add(number)
        self._joined: dict[int, _Joined] = {}
        self._lock = threading.Lock()

    def put(self, number: int, buffer: memoryview) -> None:
        """Take one frame; its bytes are not needed any more when this returns. Raises what `send` raises."""
        frame = self._frames[number]
        for part in self._parts(frame):
            begin, end = part * self._part_bytes, min((part + 1) * self._part_bytes, self._total_bytes)
            first, last = max(begin, frame.offset), min(end, frame.offset + frame.padded_bytes)
            piece = buffer[first - frame.offset : last - frame.offset]
            if len(self._shared[part]) == 1:
                self._send(part, piece, crc32(piece))
                continue
            joined = self._join(part, end - begin)
            joined.memory[first - begin : last - begin] = piece
            with self._lock:
                joined.lacks.discard(number)
                is_whole = not joined.lacks and self._joined.pop(part, None) is not None
            if is_whole:
                self._send(part, joined.memory, crc32(joined.memory))

    def _join(self, part: int, nbytes: int) -> _Joined:
        with self._lock:
            if part not in self._joined:
                # Page-aligned, as direct writes want it; and given back as soon as it was sent.
                self._joined[part] = _Joined(memoryview(mmap.mmap(-1, nbytes)), set(self._shared[part]))
            return self._joined[part]

    def _parts(self, frame: Frame) -> range:
        return range(
            frame.offset // self._part_bytes,
            (frame.offset + frame.padded_bytes - 1) // self._part_bytes + 1,
        )
