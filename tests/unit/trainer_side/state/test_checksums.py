"""A checksum over every byte of a tensor in any memory: it changes with any byte, and with nothing else."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_side.state import tensor_table as module
from trainer_side.state.survey import survey
from trainer_side.state.tensor_table import checksums, device_crcs


def of(tree: dict[str, Any], *leave_out: str) -> dict[str, int]:
    found = survey(tree)
    return dict(zip((slot.path for slot in found.specs), checksums(found, frozenset(leave_out)), strict=True))


def crc(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_checksum_is_the_crc_of_all_bytes(dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (7, 5)).to(dtype)
    assert of({"t": tensor}) == {"t": crc(tensor)}


def test_a_strided_tensors_checksum_is_of_its_memory_where_that_has_no_gaps() -> None:
    tensor = torch.arange(60.0).view(3, 4, 5)
    assert of({"t": tensor.permute(2, 0, 1)}) == {"t": crc(tensor)}


def test_bytes_between_strides_do_not_count() -> None:
    storage = torch.arange(40.0)
    view = storage[4:40:3]
    before = of({"t": view})
    storage[5] = storage[0] = -1.0
    assert of({"t": view}) == before == {"t": crc(view)}
    storage[7] = -1.0
    assert of({"t": view}) != before


def test_several_on_one_storage_are_told_apart() -> None:
    flat = torch.randn(64)
    parts = {"a": flat[:32].view(4, 8), "b": flat[32:], "tied": flat[32:]}
    assert of(parts) == {"a": crc(flat[:32]), "b": crc(flat[32:]), "tied": crc(flat[32:])}


def test_odd_shapes() -> None:
    tree = {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5),
        "repeated": torch.tensor([2.0]).expand(5),
    }
    assert of(tree) == {"empty": 0, "scalar": crc(tree["scalar"]), "repeated": crc(torch.tensor([2.0]))}


def test_a_tensor_that_is_left_out_is_not_read() -> None:
    tree = {"a": torch.ones(3), "b": torch.ones(3)}
    assert of(tree, "a") == {"a": 0, "b": crc(tree["b"])}


@settings(max_examples=30)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=12))
def test_a_checksum_of_device_memory_is_the_same(sizes: list[int]) -> None:
    """Here with host memory in the device's place: the same pieces and buffers."""
    memories = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE_BYTES", 512)
        patch.setattr(module, "_SMALL_BYTES", 300)
        assert [*device_crcs(memories)] == [crc(memory) for memory in memories]
