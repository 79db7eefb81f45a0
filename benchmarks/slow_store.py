"""A directory to which flushers write at a limited rate; another job may take a part of it for a while.

    with slow_store(options.folder, rate) as slow:   options.shape(model, **slow.shape()) …  with slow.shared(1 / 3): …

    slow.shape() ─► environment of the job ─► slow_site ─► limit() in each flusher

The rate is that of the parts of checkpoints, over all threads of a flusher. Reading back and small files are as fast as
the disk. The job must end before the store is removed.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["SlowStore", "limit", "slow_store"]


class SlowStore:
    """A store with limited bandwidth, made by `slow_store`."""

    def __init__(self, folder: Path, bytes_per_second: float) -> None:
        self._folder, self._rate = folder, bytes_per_second
        self._share = folder / "share"

    def shape(self, **environment: str) -> dict[str, Any]:
        """Return the store and environment for a job's `Shape`."""
        here = Path(__file__).resolve().parent
        places = [str(here / "slow_site"), str(here.parent), os.environ.get("PYTHONPATH", "")]
        return {
            "store": str(self._folder / "run"),
            "environment": {
                "BENCH_BYTES_PER_SECOND": str(self._rate),
                "BENCH_SHARE": str(self._share),
                "PYTHONPATH": os.pathsep.join(filter(None, places)),
                **environment,
            },
        }

    @contextlib.contextmanager
    def shared(self, part: float) -> Iterator[None]:
        """Leave the job only this part of the bandwidth during the block."""
        fresh = self._share.with_suffix(".new")
        fresh.write_text(str(part))
        fresh.rename(self._share)  # a rename, so that readers never see half a number
        try:
            yield
        finally:
            self._share.unlink()


@contextlib.contextmanager
def slow_store(folder: Path | None, bytes_per_second: float) -> Iterator[SlowStore]:
    """Yield a store, and remove its files at the end."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=folder) as kept:
        yield SlowStore(Path(kept), bytes_per_second)


def limit(bytes_per_second: float, share: str) -> None:
    """Write the parts of this process's files at this rate, or at the fraction of it that the file `share` states."""
    from holdfast.store.posix_upload import PosixUpload

    write_part, lock = PosixUpload.write_part, threading.Lock()

    def slowed(self: PosixUpload, index: int, buffers: Sequence[memoryview], crc32: int) -> None:
        with lock:
            try:
                part = float(Path(share).read_text())
            except FileNotFoundError:
                part = 1.0
            time.sleep(sum(buffer.nbytes for buffer in buffers) / bytes_per_second / part)
        write_part(self, index, buffers, crc32)

    PosixUpload.write_part = slowed  # type: ignore[method-assign]
