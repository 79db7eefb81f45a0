"""The demo's checks: each one passes on correct input, and names the fault in a wrong one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from examples.demo.checks import (
    check,
    damaged_archives,
    differences,
    losses_differ,
    open_without_holdfast,
)


def state() -> dict[str, Any]:
    return {
        "model": {"weight": torch.arange(6.0).reshape(2, 3), "flag": torch.tensor(True)},
        "optimizer": {"groups": [{"lr": 0.5, "betas": (0.9, 0.99)}], "step": torch.tensor(3.0)},
    }


def test_equal_states_have_no_difference() -> None:
    assert list(differences(state(), state())) == []


def _flip_one_bit(other: dict[str, Any]) -> None:
    weight = other["model"]["weight"]
    weight.view(torch.int32)[1, 2] ^= 1


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (_flip_one_bit, "/model/weight: 1 of 24 bytes differ"),
        (
            lambda other: other["model"].update(weight=torch.arange(6.0)),
            "/model/weight: torch.float32 (2, 3)",
        ),
        (lambda other: other["optimizer"].update(step=torch.tensor(3)), "torch.int64"),
        (lambda other: other["model"].pop("flag"), "keys"),
        (
            lambda other: other["optimizer"]["groups"][0].update(lr=0.25),
            "/optimizer/groups/0/lr: 0.5 became 0.25",
        ),
        (lambda other: other["optimizer"]["groups"][0].update(betas=[0.9, 0.99]), "tuple became list"),
        (lambda other: other["optimizer"]["groups"].append({}), "1 items became 2"),
    ],
)
def test_a_difference_is_found_and_named(change: Any, where: str) -> None:
    other = state()
    change(other)
    found = list(differences(state(), other))
    assert any(where in line for line in found), found


def test_minus_zero_is_not_zero_and_nan_equals_itself() -> None:
    assert list(differences(torch.tensor([0.0]), torch.tensor([-0.0])))
    assert not list(differences(torch.tensor([float("nan")]), torch.tensor([float("nan")])))


def test_losses_of_other_steps_or_values_are_named() -> None:
    assert losses_differ({0: 1.0, 1: 2.0}, {1: 2.0}) == []
    assert losses_differ({0: 1.0}, {0: 1.5, 1: 1.0}) == ["step 0: 1.0 became 1.5", "step 1: None became 1.0"]


def test_a_fact_keeps_the_first_things_that_are_wrong() -> None:
    assert check("claim", []).holds
    fact = check("claim", ["a", "b", "c", "d"])
    assert not fact.holds
    assert fact.wrong == "a; b; c and 1 more"


def test_a_whole_file_opens_and_passes(tmp_path: Path) -> None:
    file = tmp_path / "step.pt"
    torch.save(state(), file)
    assert open_without_holdfast([file]) == []
    assert damaged_archives([file]) == []


def test_a_file_that_needs_more_than_torch_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "step.pt"
    torch.save({"path": Path("somewhere")}, file)
    assert "step.pt" in open_without_holdfast([file])[0]


def test_an_altered_byte_fails_the_archive_test(tmp_path: Path) -> None:
    file = tmp_path / "step.pt"
    torch.save({"weight": torch.full((4096,), 7.0)}, file)
    content = bytearray(file.read_bytes())
    content[content.index(torch.full((8,), 7.0).numpy().tobytes())] ^= 1
    file.write_bytes(content)
    assert "step.pt" in damaged_archives([file])[0]
    assert damaged_archives([tmp_path / "missing.pt"])
