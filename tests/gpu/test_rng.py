"""A rank that resumes on another device of the machine continues with its own random numbers."""

from __future__ import annotations

import pytest
import torch

from trainer_side.state.rng import RngState

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_a_rank_that_moves_to_another_device_keeps_its_generator() -> None:
    here = torch.cuda.current_device()
    used = [torch.zeros(1, device=f"cuda:{index}") for index in (0, 1)]  # so the current device is the rank's
    try:
        torch.cuda.set_device(1)
        torch.cuda.manual_seed(123)
        saved, mine = RngState().state_dict(), torch.cuda.get_rng_state(1)
        torch.cuda.set_device(0)
        torch.cuda.manual_seed_all(5)
        RngState().load_state_dict(saved)
        assert torch.cuda.get_rng_state(0).equal(mine)
    finally:
        torch.cuda.set_device(here)
        del used
