"""Copies from a CUDA device: the bytes are those of the moment of `save()`, and come back on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer_side.rng import RngState
from trainer_side.skeleton import capture, plan, table
from trainer_side.staging import Staging
from trainer_side.state import classify, collect

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]


def test_the_slice_of_a_model_on_the_device_is_copied_behind_the_gate() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 512, device="cuda")).sum().backward()
    optimizer.step()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    tree = collect(state)
    proposed = table(state, tree, rank=0, ranks=1)
    skeleton = plan(
        tree,
        classify(state, tree),
        rank=0,
        ranks=1,
        chunk_bytes=65536,
        pickle_reserve_bytes=proposed.pickle_bytes + 64,
        per_rank_reserve_bytes={},
    )
    taken = capture(tree, skeleton)
    assert taken is not None
    staging = Staging(skeleton, 0, skeleton.gated, pinned=True)
    expected = [None if source is None else bytes(source.bytes().cpu().numpy()) for source in taken.sources]
    staging.copy_now(taken.sources, taken.contents)
    after = torch.cuda.current_stream().record_event()
    staging.copy_gated(taken.sources, after=after, cancelled=lambda: False, copied=lambda: None)
    assert staging.ready_bytes() == staging.nbytes == skeleton.layout.image_bytes
    for index, (entry, want) in enumerate(zip(skeleton.layout.entries, expected, strict=True)):
        got = bytes(staging.view(entry.offset, entry.nbytes))
        assert got == (taken.contents[index] if want is None else want), entry.name


def test_random_numbers_of_the_device_go_on_where_they_were() -> None:
    state = RngState()
    torch.cuda.manual_seed_all(5)
    saved = state.state_dict()
    first = torch.randn(7, device="cuda")
    state.load_state_dict(saved)
    assert torch.randn(7, device="cuda").equal(first)
