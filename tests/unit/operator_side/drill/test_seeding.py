"""The call that a drill names when two undisturbed runs of a script differ."""

from __future__ import annotations

from typing import Any

from operator_side.drill.batches import advice_on_seeding
from tests.support.job import REPOSITORY


def diary(*crcs: list[int]) -> list[dict[str, Any]]:
    """Rank 0 of a run; the batches of each step."""
    return [{"rank": 0, "batches": {"step": step, "crcs": seen}} for step, seen in enumerate(crcs)]


def test_data_that_is_not_seeded_is_named_with_the_calls_that_seed_it() -> None:
    said = advice_on_seeding(diary([1], [2]), diary([3], [2]))
    assert said.startswith("The batches of rank 0 differ already at its first step: seed the data")
    assert "generator=torch.Generator().manual_seed" in said
    assert "torch.manual_seed(1)" not in said


def test_a_model_that_is_not_seeded_is_named_where_the_batches_are_equal() -> None:
    said = advice_on_seeding(diary([1], [2]), diary([1], [3]))
    assert said.startswith(
        "The batches of the first step are equal: call torch.manual_seed(1) before the model"
    )
    assert "seed_everything" in said
    assert "use_deterministic_algorithms" in said
    assert "DataLoader" not in said


def test_all_calls_are_named_where_nothing_is_known_of_the_batches() -> None:
    said = advice_on_seeding(diary([1]), [{"rank": 0, "step": 0}])
    assert all(word in said for word in ("torch.manual_seed(1)", "seed_everything", "DataLoader"))


def test_the_advice_names_a_heading_of_its_page() -> None:
    assert "(docs/drill.md#a-script-that-is-not-deterministic)" in advice_on_seeding([], [])
    headings = (REPOSITORY / "docs" / "drill.md").read_text().splitlines()
    assert "## A script that is not deterministic" in headings
