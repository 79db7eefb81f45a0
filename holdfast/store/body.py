"""Body of an S3 request: several memory views as one file, without a copy.

A part is a run of chunks in shared memory. Joining them would copy every byte of the checkpoint again, on the cheapest
machine of the cluster. boto3 accepts any object that reads and seeks, and `read` here returns views.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

# An HTTP client asks for 16 KiB at a time, and each costs a turn of Python and a system call. Not the whole view: one
# call must end within the client's timeout (10 s), even over a slow link.
_READ_BYTES_MIN = 1 << 20


class ViewsBody:
    """Read-only, seekable. For one thread at a time."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._views = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        self._starts: list[int] = []
        total = 0
        for view in self._views:
            self._starts.append(total)
            total += view.nbytes
        self._total, self._position = total, 0
        self._current = 0

    def __len__(self) -> int:
        return self._total

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Seek as in a file, but neither before the start nor beyond the end."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._total}[whence]
        self._position = min(max(base + offset, 0), self._total)
        self._current = 0
        return self._position

    def read(self, size: int = -1) -> memoryview:
        """Return up to `size` bytes, or 1 MiB if that is more, as a view of the memory; fewer at a buffer's end."""
        while self._current < len(self._views):
            view = self._views[self._current]
            inside = self._position - self._starts[self._current]
            if inside < view.nbytes:
                piece = view[inside:] if size < 0 else view[inside : inside + max(size, _READ_BYTES_MIN)]
                self._position += piece.nbytes
                return piece
            self._current += 1
        return memoryview(b"")
