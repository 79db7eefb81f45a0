"""A file of somebody else says how much it holds; a process that reads it never takes memory for a claim."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

_GROWN_BYTES_MAX = 64 << 20
_CHILD = """
import resource, sys, torch
from pathlib import Path
from trainer_side.doors.foreign import open_foreign
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
try: open_foreign(Path(sys.argv[1]), under=None, renamed={}, dropped=[])
except Exception as error: print(peak() - before, type(error).__name__)
"""


def refused(path: Path) -> tuple[int, str]:
    """By how many bytes a process that opens the file grows, and the class of the error."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(path)], capture_output=True, text=True, check=True
    )
    grown_bytes, error = done.stdout.split()
    return int(grown_bytes), error


def test_a_zip_bomb_is_refused_before_anything_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pt"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("archive/data.pkl", "w") as entry,
    ):
        for _ in range(96):
            entry.write(bytes(1 << 20))
    assert path.stat().st_size < 1 << 20
    grown_bytes, error = refused(path)
    assert error == "DamageError"
    assert grown_bytes < _GROWN_BYTES_MAX
