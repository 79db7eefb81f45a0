"""Numbers that a script passes: which are accepted, and the error at the call for the others."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.errors import ConfigError, StateError
from trainer_side.data.sampler import ResumableSampler
from trainer_side.data.stream import ResumableStream
from trainer_side.state.per_rank import PerRank
from trainer_side.state.split_tensor import Split
from trainer_side.whole_number import STEP_MAX, step_number, whole_number


class _Angry:
    def __index__(self) -> int:
        raise RuntimeError("not now")

    def __repr__(self) -> str:
        raise RuntimeError("nor now")


TAKEN = [
    4,
    np.int64(4),
    np.uint8(4),
    np.array(4),
    torch.tensor(4),
    torch.tensor(4, dtype=torch.uint8),
    torch.nn.Parameter(torch.tensor(4), requires_grad=False),
]
REFUSED = [
    2.5,
    4.0,
    float("nan"),
    float("inf"),
    -1,
    2**62,
    2**64,
    10**30,
    True,
    np.bool_(True),
    np.float64(4),
    np.array([4]),
    np.datetime64("2026-01-01"),
    "4",
    b"4",
    None,
    [4],
    Fraction(4),
    4 + 0j,
    torch.tensor(4.0),
    torch.tensor(True),
    torch.tensor([4]),
    torch.tensor(-1),
    torch.tensor(4, device="meta"),
    torch.empty(0),
    _Angry(),
]


@pytest.mark.parametrize("value", TAKEN, ids=repr)
def test_a_step_is_a_python_int(value: Any) -> None:
    step = step_number(value, "save()")
    assert step == 4
    assert type(step) is int


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_other_values_are_refused_with_what_was_expected_and_what_came(value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        step_number(value, "save()")
    said = str(refused.value)
    assert said.startswith(f"save(): step: expected a whole number of at least 0 and at most {STEP_MAX} (")
    assert f"got {type(value).__name__} " in said
    assert said.endswith("count the training steps from 0, and give the number of the step")
    assert len(said) < 400


def test_the_last_step_is_taken() -> None:
    assert step_number(STEP_MAX, "step()") == 2**62 - 1


def test_numbers_without_bounds() -> None:
    assert whole_number(-(10**30), "seed", least=None) == -(10**30)
    with pytest.raises(StateError, match="seed: expected a whole number of at most 3"):
        whole_number(4, "seed", least=None, most=3, error=StateError)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"length": 10.5}, "sampler: length: expected a whole number of at least 1"),
        ({"length": float("nan")}, "sampler: length"),
        ({"length": 0}, "sampler: length"),
        ({"rank": True}, "sampler: rank"),
        ({"rank": -1}, "sampler: rank"),
        ({"rank": 2}, "expected a rank from 0 to ranks - 1"),
        ({"ranks": 2.0}, "sampler: ranks"),
        ({"seed": 1.5}, "sampler: seed: expected a whole number"),
        ({"seed": "1"}, "sampler: seed"),
        ({"shuffle": "no"}, "sampler: shuffle: expected True or False, got str 'no'"),
        ({"drop_last": 0}, "sampler: drop_last: expected True or False, got int 0"),
        ({"on_change": True}, "sampler: on_change"),
    ],
)
def test_a_sampler_names_the_argument_that_is_wrong(change: dict[str, Any], said: str) -> None:
    with pytest.raises(StateError, match=said):
        ResumableSampler(**{"length": 10, "seed": 1, "rank": 0, "ranks": 2, **change})


def test_a_sampler_keeps_plain_numbers() -> None:
    """Else NumPy's would be pickled into the file, which plain `torch.load` then refuses."""
    sampler = ResumableSampler(np.int64(10), seed=np.int64(3), rank=torch.tensor(0), ranks=np.int32(1))  # type: ignore[arg-type]
    next(sampler.batches(np.int64(2)))  # type: ignore[arg-type]
    assert {type(value) for value in sampler.state_dict().values()} == {int, str}


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, float("nan"), True, "2"])
def test_a_batch_size_is_refused_at_the_call(batch_size: Any) -> None:
    sampler = ResumableSampler(10, seed=1, rank=0, ranks=1)
    calls: tuple[Any, ...] = (sampler.batches, sampler.ahead, lambda size: sampler.follow([], size))
    for call in calls:
        with pytest.raises(StateError, match="sampler: batch_size: expected a whole number of at least 1"):
            call(batch_size)

    class Source:
        def __iter__(self) -> Any: ...
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, _: dict[str, Any]) -> None: ...

    with pytest.raises(StateError, match="stream: batch_size: expected a whole number of at least 1"):
        ResumableStream(Source(), rank=0, ranks=1).batches(batch_size)
    with pytest.raises(StateError, match="stream: ranks: expected a whole number of at least 1"):
        ResumableStream(Source(), rank=0, ranks=batch_size if batch_size != "2" else 0)


def test_marks_of_the_state_name_the_argument_that_is_wrong() -> None:
    with pytest.raises(StateError, match="PerRank: same_ranks: expected True or False, got str 'yes'"):
        PerRank(1, same_ranks="yes")  # type: ignore[arg-type]
    with pytest.raises(StateError, match="its value is a PerRank already"):
        PerRank(PerRank(1))
    part = torch.zeros(2)
    with pytest.raises(StateError, match="Split: start: expected a whole number of at least 0"):
        Split(part, (4,), (0.5,))  # type: ignore[arg-type]
    with pytest.raises(StateError, match="Split: shape: expected one number per dimension, got int 4"):
        Split(part, 4, (0,))  # type: ignore[arg-type]
    with pytest.raises(StateError, match="Split: expected a tensor, got list"):
        Split([1.0], (1,), (0,))  # type: ignore[arg-type]
    assert Split(part, (np.int64(4),), torch.tensor([2])).start == (2,)  # type: ignore[arg-type]
