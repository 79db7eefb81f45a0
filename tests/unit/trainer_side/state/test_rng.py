"""Random numbers continue exactly where they stopped."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import mtrand

from holdfast.errors import StateError
from trainer_side.state.per_rank_blob import decode, encode
from trainer_side.state.rng import RngState


def _draws() -> list[Any]:
    return [
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
        np.random.standard_normal(3).tolist(),  # an odd count: the generator keeps the second of a pair
        np.random.randint(0, 1 << 30, 3).tolist(),
        [random.random(), random.gauss(0, 1), random.getrandbits(40)],
    ]


@pytest.mark.parametrize("warm_up", [0, 1, 2])
def test_every_generator_goes_on_exactly(warm_up: int) -> None:
    for _ in range(warm_up):
        _draws()
    saved = decode(encode(RngState().state_dict(), name="rng"))
    expected = [_draws() for _ in range(3)]
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    RngState().load_state_dict(saved)
    assert [_draws() for _ in range(3)] == expected


def test_saving_draws_nothing() -> None:
    before = RngState().state_dict()
    after = RngState().state_dict()
    assert torch.equal(before["torch"], after["torch"])
    assert torch.equal(before["numpy"]["keys"], after["numpy"]["keys"])
    assert torch.equal(before["python"]["internal"], after["python"]["internal"])


def test_other_devices_than_before_are_told(caplog: pytest.LogCaptureFixture) -> None:
    saved = RngState().state_dict()
    saved["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * (torch.cuda.device_count() + 1)
    here = saved["cuda"][: torch.cuda.device_count()]
    if not here:
        RngState().load_state_dict(saved)
        assert "random states of 1 CUDA devices, this machine has 0" in caplog.text


@pytest.mark.parametrize("missing", ["torch", "numpy", "python"])
def test_an_invalid_rng_state_is_refused(missing: str) -> None:
    saved = RngState().state_dict()
    del saved[missing]
    with pytest.raises(StateError, match=r"^rng: expected what RngState\.state_dict"):
        RngState().load_state_dict(saved)


def test_a_generator_of_another_kind_is_refused() -> None:
    before = mtrand.get_bit_generator()
    mtrand.set_bit_generator(np.random.PCG64())
    try:
        with pytest.raises(StateError, match="PCG64"):
            RngState().state_dict()
    finally:
        mtrand.set_bit_generator(before)


class Devices:
    """Replaces `torch.cuda` with two devices, of which this process uses one."""

    def __init__(self, own: int) -> None:
        self._own = own
        self.states = [torch.tensor([10 + index], dtype=torch.uint8) for index in range(2)]

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return 0  # as in a script that writes device="cuda:1" without `set_device`

    def memory_reserved(self, index: int) -> int:
        return 1 << 20 if index == self._own else 0

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [state.clone() for state in self.states]

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        self.states[index] = state.clone()


def _on(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", devices)


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("after", [0, 1])
def test_the_numbers_follow_the_rank_not_the_index(
    before: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_by, loaded_by = Devices(before), Devices(after)
    _on(saved_by, monkeypatch)
    saved = decode(encode(RngState().state_dict(), name="rng"))
    loaded_by.states = [torch.zeros(1, dtype=torch.uint8) for _ in range(2)]
    _on(loaded_by, monkeypatch)
    RngState().load_state_dict(saved)
    assert loaded_by.states[after].item() == 10 + before
    assert loaded_by.states[1 - after].item() == 10 + 1 - after


def test_a_file_that_does_not_say_which_device_was_the_ranks_goes_by_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _on(Devices(1), monkeypatch)
    saved = RngState().state_dict()
    del saved["cuda_own"]
    loaded_by = Devices(0)
    loaded_by.states = [torch.zeros(1, dtype=torch.uint8) for _ in range(2)]
    _on(loaded_by, monkeypatch)
    RngState().load_state_dict(saved)
    assert [state.item() for state in loaded_by.states] == [10, 11]
