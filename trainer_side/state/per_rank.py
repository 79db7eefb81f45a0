"""`PerRank`: a value that differs from rank to rank, such as random number generators; a checkpoint has each rank's."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.errors import StateError
from trainer_side.state.split_tensor import writable
from trainer_side.whole_number import describe_value


class PerRank:
    """A value at the top level of the state that differs from rank to rank; a checkpoint has every rank's own.

    Args:
        value: An object with `state_dict()` and `load_state_dict()`, or tensors and plain values.
        same_ranks: Refuse a checkpoint of another number of ranks. Set it for values that are divided among the ranks,
            such as shards of data: with more or fewer ranks some would be repeated or left out.

    Attributes:
        names: Stored in the blob beside the value: names of the parameters and tensors that the value itself only
            numbers.

    Raises:
        StateError: `same_ranks` is not a bool, or `value` is a `PerRank` already.
    """

    def __init__(self, value: Any, *, same_ranks: bool = False) -> None:
        if not isinstance(same_ranks, bool):
            raise StateError(f"PerRank: same_ranks: expected True or False, got {describe_value(same_ranks)}")
        if isinstance(value, PerRank):
            raise StateError("PerRank: its value is a PerRank already; leave out one of the two")
        self.value, self.same_ranks = value, same_ranks
        self.names = b""

    def snapshot(self) -> Any:
        """Return what a checkpoint holds: the value's `state_dict()`, or the value itself if it has none."""
        return self.value.state_dict() if hasattr(self.value, "state_dict") else self.value

    def load(self, saved: Any) -> None:
        """Restore a value that `snapshot` returned. A tensor is filled in place; a plain value replaces `value`."""
        if hasattr(self.value, "load_state_dict"):
            self.value.load_state_dict(saved)
        elif isinstance(self.value, torch.Tensor) and isinstance(saved, torch.Tensor):
            with writable(self.value):
                self.value.copy_(saved)
        else:
            self.value = saved

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"
