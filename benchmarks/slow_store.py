"""A store with a limit of bytes per second for all writers together; another job may take a part of it for a while.

    with slow_store(options.folder, rate) as slow:   options.shape(model, **slow.shape()) …  with slow.shared(1 / 3): …

It keeps its files on this machine (tests/support/throttled_site). The job has to end before the store is removed.
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
    """Made by `slow_store`."""

    def __init__(self, folder: Path, bytes_per_second: float) -> None:
        self._folder, self._rate = folder, bytes_per_second
        self._share = folder / "share"

    def shape(self, **environment: str) -> dict[str, Any]:
        """Store and environment of a job's shape."""
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
        """Meanwhile this part of its bytes a second is left for the job."""
        fresh = self._share.with_suffix(".new")
        fresh.write_text(str(part))
        fresh.rename(self._share)  # a reader finds the whole number, or no file
        try:
            yield
        finally:
            self._share.unlink()


@contextlib.contextmanager
def slow_store(folder: Path | None, bytes_per_second: float) -> Iterator[SlowStore]:
    """The store; with the context its files are gone."""
    from tests.support.throttled_site import sitecustomize

    assert sitecustomize.ThrottledFileSystem.protocol, (
        "registered for this process, which reads the manifests"
    )
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=folder) as kept:
        yield SlowStore(Path(kept), bytes_per_second)
