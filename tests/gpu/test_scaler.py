"""A GradScaler in the state: its numbers are those at `save()`, which does not wait for them."""

from __future__ import annotations

import pytest
import torch

from trainer_side.state.tree import PendingNumber, collect, resolve_pending

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]


def test_the_numbers_of_a_scaler_arrive_as_they_were() -> None:
    scaler = torch.amp.GradScaler("cuda", init_scale=512.0)
    scaler.scale(torch.ones(1, device="cuda"))
    expected = scaler.state_dict()
    PendingNumber(torch.zeros((), device="cuda")).value()  # allocates pinned memory for a number
    torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]  # cycles: half a second
    queued: torch.cuda.Event = torch.cuda.current_stream().record_event()
    tree = collect({"scaler": scaler}, allow_pending=True)
    there = queued.query()  # type: ignore[no-untyped-call]
    scale = scaler._scale
    assert scale is not None
    scale.fill_(1.0)
    resolve_pending(tree)
    assert tree == {"scaler": expected}
    assert not there, "collect() has waited for the device"
