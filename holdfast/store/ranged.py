"""A stored object as a read-only file for `zipfile` and `torch.load`, over `Store.read_into`.

Each read becomes one ranged read of just the bytes asked for; wrap it in `io.BufferedReader` for many small ones.
"""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

from holdfast.store.base import Store

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class RangedFile(io.RawIOBase):
    """Seekable and read-only, with a position: one per thread. `nbytes`: if known. Raises `StoreMissing`: no object."""

    def __init__(self, store: Store, name: str, nbytes: int | None = None) -> None:
        super().__init__()
        self._store = store
        self.name = name
        self._nbytes = store.size(name) if nbytes is None else nbytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        """Position in bytes from the start."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Seek as in any file; beyond the end, reads return nothing."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._nbytes}.get(whence)
        if base is None:
            raise ValueError(f"whence must be 0, 1 or 2, got {whence}")
        if base + offset < 0:
            raise ValueError(f"{self.name}: seek to {base + offset}, before the start")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill `buffer` as far as the object goes. Raises what `Store.read_into` does."""
        with memoryview(buffer) as view, view.cast("B") as whole:
            nbytes = max(0, min(whole.nbytes, self._nbytes - self._position))
            if nbytes:
                with whole[:nbytes] as target:
                    self._store.read_into(self.name, self._position, target)
            self._position += nbytes
            return nbytes
