"""A store that limits the bytes per second of all writers together; another job may take a part of them for a while.

    with slow_store(options.folder, rate) as slow:   options.shape(model, **slow.shape()) …  with slow.shared(1 / 3): …

The files are on this machine (tests/support/throttled_site). The job must end before the store is removed.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["SlowStore", "slow_store"]

_ROOT = Path(__file__).parents[1]
_SITE = _ROOT / "tests" / "support" / "throttled_site"


class SlowStore:
    """A store with limited bandwidth, made by `slow_store`."""

    def __init__(self, folder: Path, bytes_per_second: float) -> None:
        self._folder, self._rate = folder, bytes_per_second
        self._share = folder / "share"

    def shape(self, **environment: str) -> dict[str, Any]:
        """Return the store and environment for a job's `Shape`."""
        return {
            "store": f"throttled://{self._folder}/run",
            "environment": {
                "THROTTLED_BYTES_PER_SECOND": str(round(self._rate)),
                "THROTTLED_SHARE": str(self._share),
                "PYTHONPATH": os.pathsep.join([str(_ROOT), str(_SITE)]),
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
    from tests.support.throttled_site import sitecustomize

    assert sitecustomize.ThrottledFileSystem.protocol, (
        "registered for this process, which reads the manifests"
    )
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=folder) as kept:
        yield SlowStore(Path(kept), bytes_per_second)
