"""A buffer in huge pages is like any other: writable, zero, all of it there."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch

from trainer_side.save.huge import huge_buffer

_PAGE_BYTES = 2 << 20


@pytest.mark.parametrize("nbytes", [1, 4097, 3 * _PAGE_BYTES])
def test_it_is_zero_and_holds_what_is_written(nbytes: int) -> None:
    buffer = huge_buffer(nbytes)
    assert (buffer.dtype, tuple(buffer.shape)) == (torch.uint8, (nbytes,))
    assert not buffer.any()
    buffer.fill_(7)
    assert bytes(buffer.numpy().data) == b"\x07" * nbytes


def test_all_of_it_has_been_touched() -> None:
    buffer = huge_buffer(8 * _PAGE_BYTES)
    mapping = _mapping(buffer.data_ptr())
    assert int(mapping["Rss"]) * 1024 >= buffer.numel()
    if "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        assert int(mapping["AnonHugePages"]) * 1024 >= buffer.numel() - 2 * _PAGE_BYTES


def test_a_kernel_without_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr("trainer_side.save.huge.mmap.mmap", Plain)
    assert not huge_buffer(_PAGE_BYTES).any()


def _mapping(address: int) -> dict[str, str]:
    """What the kernel says of the mapping with this address, sizes in KiB."""
    found: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        begins = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if begins:
            inside = int(begins[1], 16) <= address < int(begins[2], 16)
        elif inside:
            name, value = line.split(":", 1)
            found[name] = value.split()[0]
    return found
