"""Memory growth of a process that restores parts of whole tensors, and of one that exports a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.restoring import publish

_CHILD = """
import resource, sys, torch
from pathlib import Path
from holdfast.store.posix import PosixStore
from trainer_side.ranks.peers import LonePeers
from trainer_side.restore.restore import restore
from trainer_side.restore.restore_attempt import RestoreOptions
from trainer_side.state.split_tensor import Split

rows, count, ranks = int(sys.argv[2]), int(sys.argv[3]), 10
begin, each = 3 * rows // ranks, rows // ranks
state = {str(number): Split(torch.zeros(each, 1024), (rows, 1024), (begin, 0)) for number in range(count)}
store = PosixStore(Path(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
restore({"w": state}, store, LonePeers(), events=None, options=RestoreOptions(threads=2))
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
expected = torch.arange(begin, begin + each)[:, None]
for number, part in enumerate(state.values()):
    assert bool((part.tensor == expected + number).all())
print(grown * 1024)
"""
_CONSTANT_BYTES = 64 << 20  # code that is loaded, and a window for each of two readers


@pytest.mark.parametrize("count", [1, 80], ids=["one large tensor", "many"])
def test_memory_is_the_ranks_own_part_and_a_constant(tmp_path: Path, count: int) -> None:
    all_rows = 48_000  # of 4 KiB each: 187 MiB
    size = all_rows // count
    one = torch.arange(float(size))[:, None].expand(-1, 1024)
    tensors = {str(number): (one + number).contiguous() for number in range(count)}
    publish(tmp_path, 5, {"w": tensors}, chunk_bytes=4 << 20)
    arguments = [sys.executable, "-c", _CHILD, str(tmp_path), str(size), str(count)]
    child = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    own_bytes = all_rows // 10 * 4096
    assert int(child.stdout) < own_bytes + _CONSTANT_BYTES < all_rows * 4096 // 2


_EXPORT = """
import resource, sys
from pathlib import Path
from holdfast.store import open_store
from holdfast.checkpoints.catalog import Catalog
from trainer_side.convert.safetensors_out import write_safetensors
store = open_store(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_safetensors(store, Catalog(store).get(), Path(sys.argv[2]), only=None, quiet=True)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_an_export_takes_no_memory_for_the_file(tmp_path: Path) -> None:
    publish(tmp_path / "run", 3, {"big": torch.ones(24 << 20)}, chunk_bytes=16 << 20)
    command = [sys.executable, "-c", _EXPORT, str(tmp_path / "run"), str(tmp_path / "out.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64 << 10, "KiB of memory for a file of 96 MiB"
