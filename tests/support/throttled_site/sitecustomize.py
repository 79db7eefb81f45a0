"""On PYTHONPATH of a job: gives all its processes a slow store; all else runs at full speed.

`throttled://` keeps its files on this machine, and accepts THROTTLED_BYTES_PER_SECOND, over all writers together.
While the file THROTTLED_STALL exists, the store accepts nothing. While THROTTLED_SECONDS exists, each piece takes the
seconds written in that file.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any

from fsspec import register_implementation
from fsspec.implementations.local import LocalFileSystem

_LOCK = threading.Lock()
_STALL_SECONDS_MAX = 300.0


class ThrottledFileSystem(LocalFileSystem):
    protocol = ("throttled", "throttled")

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("throttled://")))  # type: ignore[no-untyped-call]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        with _LOCK:
            time.sleep(len(value) / float(os.environ["THROTTLED_BYTES_PER_SECOND"]))
            slow = os.environ.get("THROTTLED_SECONDS")
            if slow and Path(slow).exists():
                time.sleep(float(Path(slow).read_text()))
            stall = os.environ.get("THROTTLED_STALL")
            deadline = time.monotonic() + _STALL_SECONDS_MAX
            while stall and Path(stall).exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        super().pipe_file(path, value, mode=mode, **kwargs)  # type: ignore[no-untyped-call]


register_implementation("throttled", ThrottledFileSystem, clobber=True)  # type: ignore[no-untyped-call]
