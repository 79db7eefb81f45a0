"""Non-finite numbers are counted exactly, in any format and with any way of reading."""

from __future__ import annotations

import math
import random
import tracemalloc
import zlib

import pytest
import torch

from holdfast.checkpoints.nonfinite import (
    _FORMATS,
    count_nonfinite,
    count_nonfinite_of_each,
    crc32_and_nonfinite,
)
from holdfast.checkpoints.verification import verify_file
from holdfast.image.manifest import Manifest, NonfiniteRecord, TensorRecord
from tests.support.checkpoints import add, manifest_of, torch_image
from tests.support.memory_store import MemoryStore

FORMATS = sorted(_FORMATS)


def bits(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("name", FORMATS)
def test_nonfinite_counts_are_torchs(name: str) -> None:
    dtype = getattr(torch, name)
    random = torch.randint(0, 256, (160_000 * dtype.itemsize,), dtype=torch.uint8)
    values = random.view(dtype)
    if dtype.is_complex:
        values = torch.view_as_real(values)
    finite = torch.isfinite(values.double() if dtype.itemsize == 1 else values)
    expected = int(finite.numel() - finite.sum())
    assert expected, "random bits have some"
    assert count_nonfinite(bits(values), _FORMATS[name]) == expected
    assert crc32_and_nonfinite(bits(values), _FORMATS[name]) == (zlib.crc32(bits(values)), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_a_nonfinite_value_of_either_sign_is_counted_among_finite_ones(name: str) -> None:
    this = _FORMATS[name]
    sign = 1 << 8 * this.nbytes - 1
    greatest = (this.mask - 1).to_bytes(this.nbytes, "little")
    least = (sign | this.mask - 1).to_bytes(this.nbytes, "little")
    for spoilt in (this.mask, sign | this.mask, sign - 1, 2 * sign - 1):
        data = bytearray((greatest + least + bytes(this.nbytes)) * 700)
        assert count_nonfinite(memoryview(data), this) == 0
        data[1001 * this.nbytes : 1002 * this.nbytes] = spoilt.to_bytes(this.nbytes, "little")
        assert count_nonfinite(memoryview(data), this) == 1, hex(spoilt)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("count", "apart"), [(300, 64), (300, 9000), (3, 70_000)])
def test_runs_counted_together_count_as_each_by_itself(name: str, count: int, apart: int) -> None:
    """Small ones with headers between them, of random bytes; few that lie far apart; large ones."""
    this = _FORMATS[name]
    chance = random.Random(count * apart)
    data = memoryview(bytearray(chance.randbytes(count * apart)))
    for _ in range(count):
        at = chance.randrange(len(data) - 100)
        data[at : at + 100] = b"\xff" * 100
    runs = [
        (begin, begin + chance.randrange(min(apart, 40_000) * 3 // 4))
        for begin in range(0, count * apart, apart)
    ]
    expected = [count_nonfinite(data[begin:end], this) for begin, end in runs]
    assert sum(expected), "there are some"
    assert count_nonfinite_of_each(data, runs, this) == expected
    shifted = [
        (begin + 1, end + 1) for begin, end in runs
    ]  # so no value of theirs begins where those of `data` do
    assert count_nonfinite_of_each(data, shifted, this) == [
        count_nonfinite(data[begin:end], this) for begin, end in shifted
    ]


def test_the_memory_that_it_takes_does_not_grow_with_the_tensor() -> None:
    data = memoryview(bytes(64 << 20))
    tracemalloc.start()
    assert count_nonfinite(data, _FORMATS["float32"]) == 0
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2 << 20


def checkpoint_of(state: dict[str, torch.Tensor], *, chunk_bytes: int = 4096) -> tuple[MemoryStore, Manifest]:
    image = torch_image(state)
    places = {path: f"data/{index}" for index, path in enumerate(state)}
    manifest = manifest_of(image, step=1, tensors=places, chunk_bytes=chunk_bytes)
    tensors = tuple(
        TensorRecord(
            path=one.path,
            dtype=str(state[one.path].dtype).removeprefix("torch."),
            shape=tuple(state[one.path].shape),
            entry=one.entry,
        )
        for one in manifest.tensors
    )
    manifest = manifest.model_copy(update={"tensors": tensors})
    store = MemoryStore()
    add(store, manifest, image)
    return store, manifest


def broken_state(scale: int = 1) -> dict[str, torch.Tensor]:
    weight = torch.randn(scale * 5000, dtype=torch.bfloat16)
    weight[[0, 2047, 2048, 4999]] = math.nan
    bias = torch.randn(scale * 3000)
    bias[7] = -math.inf
    return {"weight": weight, "bias": bias, "good": torch.randn(10), "steps": torch.full((9,), -1)}


@pytest.mark.parametrize("chunk_bytes", [4096, 1 << 20])
@pytest.mark.parametrize("buffer_bytes", [512, 1 << 20])
@pytest.mark.parametrize("scale", [1, 60])
def test_reading_back_counts_per_tensor(chunk_bytes: int, buffer_bytes: int, scale: int) -> None:
    store, manifest = checkpoint_of(broken_state(scale), chunk_bytes=chunk_bytes)
    report = verify_file(store, manifest, buffer_bytes=buffer_bytes)
    assert report.ok
    assert report.nonfinite == NonfiniteRecord(values=5, tensors=2, named={"weight": 4, "bias": 1})


def test_tensors_that_share_a_storage_are_both_named_and_counted_once() -> None:
    store, manifest = checkpoint_of(broken_state())
    tied = manifest.tensors[0].model_copy(update={"path": "tied"})
    manifest = manifest.model_copy(update={"tensors": (*manifest.tensors, tied)})
    found = verify_file(store, manifest).nonfinite
    assert found == NonfiniteRecord(values=5, tensors=3, named={"weight": 4, "bias": 1, "tied": 4})


def test_a_storage_of_two_formats_is_not_counted() -> None:
    store, manifest = checkpoint_of(broken_state())
    other = manifest.tensors[0].model_copy(update={"path": "raw", "dtype": "uint8"})
    manifest = manifest.model_copy(update={"tensors": (*manifest.tensors, other)})
    assert verify_file(store, manifest).nonfinite == NonfiniteRecord(values=1, tensors=1, named={"bias": 1})


def test_reads_that_cut_numbers_in_two_say_that_nothing_is_known() -> None:
    store, manifest = checkpoint_of(broken_state(), chunk_bytes=1001)
    report = verify_file(store, manifest)
    assert report.ok
    assert report.nonfinite is None


def test_a_damaged_file_says_nothing_of_its_numbers() -> None:
    store, manifest = checkpoint_of(broken_state())
    image = bytearray(store.objects[manifest.file])
    image[manifest.entries[2].offset] ^= 1
    store.objects[manifest.file] = bytes(image)
    assert verify_file(store, manifest).nonfinite is None


def test_a_state_that_is_broken_all_over_names_some_of_its_tensors() -> None:
    state = {f"t{index}": torch.full((2,), math.nan) for index in range(150)}
    store, manifest = checkpoint_of(state)
    found = verify_file(store, manifest).nonfinite
    assert found is not None
    assert (found.values, found.tensors, len(found.named)) == (300, 150, 100)
    marked = manifest.model_copy(update={"nonfinite": found})
    assert Manifest.from_bytes(marked.to_bytes(), source="here") == marked
    assert "300 numbers are not finite (NaN or infinite), in t0, t1, t2, t3 and 146 more" in found.describe()


def test_a_manifest_without_the_field_has_the_bytes_of_before() -> None:
    _, manifest = checkpoint_of(broken_state())
    assert b"nonfinite" not in manifest.to_bytes()
