"""Fingerprints cover every byte that they should, have a known cost, and do not depend on how they are made."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from holdfast.image.replicas import decode, stride
from tests.support.calls import python_calls
from trainer_side.save import fingerprint
from trainer_side.save.fingerprint import DeviceSamples, Fingerprints
from trainer_side.state.survey import StoragePart, StorageSource

SIZES = [1, 3, 63, 64, 65, 4096, 4097, 5000, 64 * 64 * 5 + 7]


def _sources(tensors: list[torch.Tensor]) -> list[StorageSource | None]:
    return [StoragePart(t.untyped_storage(), 0, t.nbytes).source(entry) for entry, t in enumerate(tensors)]


def _tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randint(0, 256, (nbytes,), dtype=torch.uint8) for nbytes in SIZES]


def _taken(tensors: list[torch.Tensor], step: int, *, gated: bool = True) -> tuple[int, ...]:
    fingerprints = Fingerprints(range(len(tensors)), [gated] * len(tensors), step)
    fingerprints.sample_now(_sources(tensors))
    fingerprints.sample_gated(_sources(tensors))
    return decode(fingerprints.text(), len(tensors))


@pytest.mark.parametrize("place", range(len(SIZES)))
def test_each_byte_counts_in_some_step_and_only_for_its_tensor(place: int) -> None:
    clean, dirty = _tensors(), _tensors()
    steps = range(12 * stride(SIZES[place]))
    for byte in {0, SIZES[place] // 2, SIZES[place] - 1}:
        dirty[place][byte] ^= 1
        seen = [
            [i for i, (a, b) in enumerate(zip(_taken(clean, s), _taken(dirty, s), strict=True)) if a != b]
            for s in steps
        ]
        assert [place] in seen
        assert all(found in ([], [place]) for found in seen)
        dirty[place][byte] ^= 1


def test_gated_or_not_is_the_same_fingerprint() -> None:
    assert _taken(_tensors(), 5, gated=True) == _taken(_tensors(), 5, gated=False)


def test_ungated_tensors_are_sampled_at_once() -> None:
    tensors = _tensors()
    want = _taken(tensors, 3)
    fingerprints = Fingerprints(range(len(tensors)), [False] * len(tensors), 3)
    fingerprints.sample_now(_sources(tensors))
    for tensor in tensors:
        tensor.zero_()
    fingerprints.sample_gated(_sources(tensors))
    assert decode(fingerprints.text(), len(tensors)) == want


@pytest.mark.parametrize("step", [0, 1, 77])
def test_gathering_as_on_a_device_gives_the_same(step: int) -> None:
    tensors = _tensors()
    sources = [source for source in _sources(tensors) if source is not None]
    fingerprints = Fingerprints(range(len(tensors)), [True] * len(tensors), step)
    fingerprints._gathered.append(fingerprint._gather(sources, step))
    assert decode(fingerprints.text(), len(tensors)) == _taken(tensors, step)


def test_at_most_4_kib_of_a_tensor_are_read() -> None:
    large = torch.zeros(3_000_001, dtype=torch.uint8)
    (source,) = [source for source in _sources([large]) if source is not None]
    assert fingerprint._gather([source], 9).memory.numel() <= 4096 + 64


def test_small_tensors_cost_no_python_calls() -> None:
    calls = []
    for count in (50, 500):
        sources = _sources([torch.ones(16) for _ in range(count)])
        fingerprints = Fingerprints(range(count), [True] * count, 3)

        def take(fingerprints: Fingerprints = fingerprints, sources: Sequence[Any] = sources) -> None:
            fingerprints.sample_now(sources)
            fingerprints.sample_gated(sources)
            fingerprints.text()
            fingerprints.digest()

        calls.append(python_calls(take))
    assert calls[0] == calls[1]


def _memory(address: int, nbytes: int) -> torch.Tensor:
    """Memory of this process by address, as `DeviceStream.span` gives it of a device."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


@pytest.mark.parametrize("step", range(12))
def test_rows_by_address_give_the_same_with_as_many_calls_for_any_number_of_tensors(step: int) -> None:
    torch.manual_seed(0)
    flat = torch.randint(0, 256, (3 << 20,), dtype=torch.uint8)  # the tensors are not far apart
    at = -flat.data_ptr() % 64
    sizes = [*SIZES, *range(4090, 4170, 3), 100_000, 99_968, 1 << 20]
    sources: list[StorageSource] = []
    for entry, nbytes in enumerate(sizes):
        sources.append(StoragePart(flat.untyped_storage(), at, nbytes).source(entry))
        at += -(-nbytes // 64) * 64 + (4 if nbytes > 64 else 0)
        at += -at % 64 if entry < len(SIZES) else 0
    samples = DeviceSamples(torch.device("cpu"), _memory)
    samples.gather(sources, step + 1)
    rows: list[Any] = []
    calls = python_calls(lambda: rows.append(samples.gather(sources, step)), of="trainer_side/save")
    assert dict(rows[0].crcs()) == dict(fingerprint._gather(sources, step).crcs())
    assert calls <= 6


def test_rows_follow_tensors_that_move_and_small_ones_across_two_rows_are_left_out() -> None:
    samples = DeviceSamples(torch.device("cpu"), _memory)
    for seed in range(3):
        torch.manual_seed(seed)
        flat = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8)
        begin = -flat.data_ptr() % 64
        sources = [StoragePart(flat.untyped_storage(), begin + 128 * n, 100).source(n) for n in range(50)]
        rows = samples.gather(sources, seed)
        assert rows is not None
        assert dict(rows.crcs()) == dict(fingerprint._gather(sources, seed).crcs())
        crossing = StoragePart(flat.untyped_storage(), begin + 60, 10).source(0)
        assert samples.gather([crossing], seed) is None
    assert samples.gather([], 3) is None
