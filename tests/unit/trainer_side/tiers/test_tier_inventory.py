"""Restore's messages to a tier about the steps found in it come in this order, whichever step was restored."""

from __future__ import annotations

import pytest

from trainer_side.tiers.tier import Order, StepVerdict
from trainer_side.tiers.tier_inventory import TierInventory

INVENTORY = TierInventory(1, (((1, 7), (1, 5), (1, 3)),), (((1, 9), (1, 6)),))


def said(verdicts: list[StepVerdict]) -> list[tuple[int, bool]]:
    return [(verdict.order[1], verdict.complete) for verdict in verdicts]


@pytest.mark.parametrize(
    ("restored", "whole_in", "expected"),
    [
        (None, (), [(7, True)]),
        ((1, 7), (), [(7, True), (9, False)]),
        ((1, 7), ("here",), [(7, True), (9, False)]),
        ((1, 5), ("here",), [(5, True), (7, False), (9, False), (6, False)]),
        ((1, 7), ("elsewhere",), [(5, True), (7, False), (9, False), (6, False)]),
        ((1, 2), ("here",), [(7, False), (5, False), (3, False), (9, False), (6, False)]),
        ((1, 3), ("elsewhere",), [(7, False), (5, False), (3, False), (9, False), (6, False)]),
    ],
    ids=[
        "no restore",
        "newest",
        "newest, here",
        "older",
        "damaged here",
        "none is usable",
        "the only one is damaged",
    ],
)
def test_the_step_to_keep_is_named_first_and_newer_or_damaged_ones_are_void(
    restored: Order | None, whole_in: tuple[str, ...], expected: list[tuple[int, bool]]
) -> None:
    assert said(INVENTORY.verdicts(0, "here", restored, whole_in)) == expected


def test_an_empty_tier_is_told_nothing() -> None:
    found = TierInventory(0, ((),), ((),))
    assert found.verdicts(0, "here", (1, 5), {"elsewhere"}) == []
