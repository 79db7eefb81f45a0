"""A rank's share of the machine's cores."""

from __future__ import annotations

import os

import pytest

from trainer_side.tiers.first_touch import cores_of_rank


@pytest.mark.parametrize(
    ("usable", "environment", "expected"),
    [
        (16, {}, 16),
        (16, {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        (16, {"LOCAL_WORLD_SIZE": "8"}, 2),
        (16, {"LOCAL_WORLD_SIZE": ""}, 16),
        (16, {"LOCAL_WORLD_SIZE": "64"}, 1),
        (4, {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
    ],
)
def test_a_rank_has_its_share_of_all_cores_or_those_it_is_bound_to(
    usable: int, environment: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(usable)))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert cores_of_rank() == expected
