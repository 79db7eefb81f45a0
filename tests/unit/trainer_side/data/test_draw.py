"""A loop that draws its next batch before it saves: killed anywhere, it trains on the plain loop's batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.errors import StateError
from trainer_side.data.draw import ResumableDraw
from trainer_side.state.per_rank import PerRank
from trainer_side.state.per_rank_blob import decode, encode
from trainer_side.state.rng import RngState

STEPS, MICRO = 6, 2
Draw = Callable[[str], list[float]]


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    before = RngState().state_dict()
    yield
    RngState().load_state_dict(before)


def from_torch(split: str) -> list[float]:
    return [float(len(split)), *torch.randint(1000, (4,)).tolist()]


def from_numpy(split: str) -> list[float]:
    return [float(len(split)), *np.random.randint(0, 1000, 4).tolist()]


def from_python(split: str) -> list[float]:
    return [float(len(split)), *(random.randrange(1000) for _ in range(4))]


def loop(draw: Draw, evaluate: Draw, *, first: int = 0) -> Iterator[list[Any]]:
    """As nanoGPT's, with dropout from the same generator; gives the batches of each step."""
    batch = draw("train")
    for step in range(first, STEPS):
        if step % 2 == 0:
            evaluate("val")
        seen: list[Any] = []
        for _ in range(MICRO):
            seen += [batch, torch.rand(2).tolist()]
            batch = draw("train")
        yield seen


def begin() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)


def saved_after(draw: ResumableDraw[[str], list[float]]) -> dict[str, Any]:
    """As a checkpoint has it."""
    return {
        "draw": decode(encode(draw.snapshot(), name="draw"), name="draw"),
        "rng": RngState().state_dict(),
    }


def resume(draw: ResumableDraw[[str], list[float]], saved: dict[str, Any]) -> None:
    torch.manual_seed(99)
    draw.load(saved["draw"])
    RngState().load_state_dict(saved["rng"])


@pytest.mark.parametrize("source", [from_torch, from_numpy, from_python])
def test_a_loop_that_resumes_after_any_step_has_the_batches_of_the_plain_loop(source: Draw) -> None:
    begin()
    plain = list(loop(source, source))
    for at in range(1, STEPS):
        begin()
        draw = ResumableDraw(source)
        steps = loop(draw, source)
        assert [next(steps) for _ in range(at)] == plain[:at]
        saved = saved_after(draw)
        again = ResumableDraw(source)
        resume(again, saved)
        # A save before the first draw has the same batch in hand.
        resumed = ResumableDraw(source)
        resume(resumed, saved_after(again))
        assert list(loop(resumed, source, first=at)) == plain[at:]


def test_random_numbers_alone_skip_the_batch_in_hand() -> None:
    """The other test would fail in this way."""
    begin()
    plain = list(loop(from_torch, from_torch))
    begin()
    steps = loop(from_torch, from_torch)
    next(steps)
    rng = RngState().state_dict()
    RngState().load_state_dict(rng)
    assert next(loop(from_torch, from_torch, first=1)) != plain[1]


def test_a_checkpoint_without_a_batch_in_hand_has_none_drawn_again() -> None:
    begin()
    saved = saved_after(ResumableDraw(from_torch))
    expected = from_torch("train")
    draw = ResumableDraw(from_torch)
    resume(draw, saved)
    assert draw("train") == expected


def test_a_draw_that_fails_leaves_the_batch_in_hand_due() -> None:
    begin()
    draw = ResumableDraw(from_torch)
    expected = draw("train")
    saved, failing = saved_after(draw), [True]

    def broken_at_first(split: str) -> list[float]:
        if failing:
            raise OSError(failing.pop())
        return from_torch(split)

    again = ResumableDraw(broken_at_first)
    resume(again, saved)
    with pytest.raises(OSError, match="True"):
        again("train")
    assert again("train") == expected


def test_a_restore_after_the_first_draw_is_refused() -> None:
    draw = ResumableDraw(from_torch)
    draw("train")
    with pytest.raises(StateError, match=r"expected restore\(\) before the first batch"):
        draw.load(draw.snapshot())


@pytest.mark.parametrize("saved", [{"epoch": 3}, 7])
def test_the_state_of_something_else_is_refused(saved: Any) -> None:
    with pytest.raises(StateError, match="expected the state of a ResumableDraw"):
        ResumableDraw(from_torch).load(saved)


def test_a_function_with_a_generator_of_its_own_is_refused() -> None:
    own = torch.Generator().manual_seed(3)

    def from_own() -> list[int]:
        return torch.randint(1000, (4,), generator=own).tolist()

    with pytest.raises(StateError, match="from_own has drawn nothing from the global generators"):
        ResumableDraw(from_own)()
    with pytest.raises(StateError, match="expected a function that draws a batch, got int 3"):
        ResumableDraw(3)  # type: ignore[arg-type]


def test_a_value_of_each_rank_needs_no_wrapper() -> None:
    assert isinstance(ResumableDraw(from_torch), PerRank)
    with pytest.raises(StateError, match="is a PerRank already"):
        PerRank(ResumableDraw(from_torch))
