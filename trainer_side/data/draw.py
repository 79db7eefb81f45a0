"""`ResumableDraw`: random batches that a script draws ahead, without a loader.

    draw ─► X, Y ─► forward ─► draw ─► X', Y' ─► backward ─► step ─► evaluation ─► save
                               ▲ the checkpoint has the random state at this draw    ▲ and, by RngState, the one here
    resumed: first draw ─► state at the draw ─► X', Y' ─► state at the save ─► forward …

X', Y' is the batch in hand: drawn before the checkpoint, and trained on after it. With `RngState` alone a resumed run
draws another batch in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from holdfast.errors import StateError
from trainer_side.opaque import opaque_methods
from trainer_side.state.per_rank import PerRank
from trainer_side.state.rng import RngState
from trainer_side.whole_number import describe_value

_P = ParamSpec("_P")
_Batch = TypeVar("_Batch")


class _BatchInHand:
    """The random states from which the batch in hand was drawn. Training thread."""

    def __init__(self) -> None:
        self.before: dict[str, Any] | None = None  # the states before the newest draw; None without a draw
        self.drawn = False  # this process has drawn a batch
        self.due = False  # the next draw repeats the batch in hand of a checkpoint

    def state_dict(self) -> dict[str, Any]:
        return {"before": self.before}

    def load_state_dict(self, saved: Any) -> None:
        if self.drawn:
            raise StateError(
                "ResumableDraw: expected restore() before the first batch, got it after a batch was drawn; draw the "
                "first batch after restore(), which then is the batch in hand of the checkpoint"
            )
        if not isinstance(saved, dict) or "before" not in saved:
            raise StateError(
                f"ResumableDraw: expected the state of a ResumableDraw, got {describe_value(saved)}; give it the "
                "name in the state with which it was saved"
            )
        self.before = saved["before"]
        self.due = self.before is not None


@opaque_methods
class ResumableDraw(PerRank, Generic[_P, _Batch]):
    """A function that draws random batches; a resumed run draws the batch in hand again.

    For a loop that draws the next batch while a step runs, as nanoGPT does: put the object into the state of the
    `Checkpointer` beside `PerRank(RngState())`, and draw all training batches through it, the first one after
    `restore()`. An uninterrupted run draws the same batches as `draw` alone. An evaluation calls `draw` itself. The
    object is per rank without `PerRank` around it. Only the training thread may call it.

    Not for a loop that draws each batch right before it trains on it: no batch is in hand at its checkpoints, and the
    `RngState` is enough.

    Args:
        draw: The function. It must draw only from the global generators of torch, NumPy or Python.

    Raises:
        StateError: The first call of `draw` did not change a global generator; or `restore()` came after a draw.
    """

    def __init__(self, draw: Callable[_P, _Batch]) -> None:
        if not callable(draw):
            raise StateError(
                f"ResumableDraw: expected a function that draws a batch, got {describe_value(draw)}"
            )
        self._draw, self._generators, self._in_hand = draw, RngState(), _BatchInHand()
        super().__init__(self._in_hand)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _Batch:
        """Draw the next batch. The first call after a restore repeats the batch in hand, and keeps the random state."""
        now, in_hand = self._generators.state_dict(), self._in_hand
        if in_hand.due:
            assert in_hand.before is not None
            self._generators.load_state_dict(in_hand.before)
            batch = self._draw(*args, **kwargs)
            self._generators.load_state_dict(now)
        else:
            batch = self._draw(*args, **kwargs)
            if not in_hand.drawn and _equal(now, self._generators.state_dict()):
                raise StateError(
                    f"ResumableDraw: {getattr(self._draw, '__name__', self._draw)} has drawn nothing from the global "
                    "generators of torch, NumPy and Python, so the batch could not be drawn again; draw from one of "
                    "them, or take samples through a ResumableSampler"
                )
            in_hand.before = now
        in_hand.drawn, in_hand.due = True, False
        return batch


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return all(map(_equal, one, other))
    return bool(one == other)
