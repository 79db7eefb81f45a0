"""A tensor that layout and manifest cannot represent is refused by name on its rank."""

from __future__ import annotations

import pytest
import torch

from holdfast.errors import StateError
from trainer_side.state.tensor_table import table


@pytest.mark.parametrize("key", ["k" * 5000, "half \ud800 pair"])
def test_a_key_that_no_manifest_holds_is_a_state_error(key: str) -> None:
    state = {"extra": {key: torch.zeros(3)}}
    with pytest.raises(StateError, match=r"tensor extra/(kkk|half \\ud800).*(shorten|rename)"):
        table(state, state, rank=0, ranks=1)


def test_long_and_strange_keys_that_a_manifest_holds_are_taken() -> None:
    state = {"extra": {"k" * 4000: torch.zeros(3), "ключ\n\U0001f600": torch.zeros(3)}}
    assert len(table(state, state, rank=0, ranks=1).rows) == 2
