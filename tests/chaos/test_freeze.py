"""Flushers that freeze while they are replaced (tests/chaos/freezing.py), except the cells in tests/chaos/regular."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.freezing import ELSEWHERE_CELLS, FREEZE_CELLS, FreezeCell, freeze_parameters, play_freeze


@pytest.mark.parametrize(
    "cell", freeze_parameters(cell for cell in (*FREEZE_CELLS, *ELSEWHERE_CELLS) if not cell.regular)
)
def test_freeze_cell(cell: FreezeCell, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    play_freeze(cell, request, tmp_path)
