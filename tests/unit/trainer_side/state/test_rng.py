"""Random numbers go on exactly where they were."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import mtrand

from holdfast.errors import StateError
from trainer_side.state.per_rank import decode, encode
from trainer_side.state.rng import RngState


def _draws() -> list[Any]:
    return [
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
        np.random.standard_normal(3).tolist(),  # an odd number: the second of a pair is kept for later
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
def test_what_is_no_rng_state_is_refused(missing: str) -> None:
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
