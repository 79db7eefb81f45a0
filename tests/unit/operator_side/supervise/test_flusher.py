"""The flusher of a supervised run: kept until it is let go, and gone when its process is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from holdfast.ring.wanted import is_kept
from operator_side.supervise.flusher import KeptFlusher

_GIVES_BACK_FIRST = """
import os, sys, time
from pathlib import Path
file = Path(sys.argv[1]) / "flusher.pid"
file.write_text(f"{os.getpid()}\\n")
print(flush=True)
sys.stdin.readline()
file.unlink()
print(flush=True)
sys.stdin.readline()
"""


def test_it_is_waited_for_until_its_process_is_gone_not_its_files(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    kept = KeptFlusher(directory)
    line = [sys.executable, "-c", _GIVES_BACK_FIRST, str(directory)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        assert is_kept(directory)
        kept.let_go()
        assert not is_kept(directory)
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        assert not (directory / "flusher.pid").exists()
        assert not kept.ends_within(0)
        process.stdin.close()
        # Nobody has waited for it yet: it is a zombie, and counts as gone.
        assert kept.ends_within(60)


def test_where_there_is_none_nothing_is_waited_for(tmp_path: Path) -> None:
    kept = KeptFlusher(tmp_path / "run")
    kept.let_go()
    assert kept.ends_within(60)
    assert not kept.left_ring
    kept.let_go()
    assert not (tmp_path / "run").exists()
