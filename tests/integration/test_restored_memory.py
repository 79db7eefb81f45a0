"""How much memory a rank grows by while its parts of whole tensors come back from the store."""

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
from trainer_side.restore.restore import RestoreOptions, restore
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
