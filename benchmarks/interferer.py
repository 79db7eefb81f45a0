"""Another job on the same machine: it writes to the disk of the store and syncs, again and again.

with interference(folder): …        python -m benchmarks.interferer FILE
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.jobs import end_process

__all__ = ["interference"]

_BYTES = 64 << 20


@contextlib.contextmanager
def interference(folder: Path) -> Iterator[None]:
    """Have it run beside what is measured, and leave nothing of it."""
    path = folder / "interference"
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.interferer", str(path)])
    try:
        yield
    finally:
        end_process(process.pid)
        process.wait()
        path.unlink(missing_ok=True)


def main() -> None:
    """Until it is ended."""
    data = os.urandom(_BYTES)
    with Path(sys.argv[1]).open("wb", buffering=0) as file:
        while True:
            file.seek(0)
            file.write(data)
            os.fsync(file.fileno())


if __name__ == "__main__":
    main()
