"""The kill matrix, except the cells in tests/chaos/regular: every cell of tests/chaos/cells.py is one test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.cells import (
    CELLS,
    DOUBT_CELLS,
    GROWTH_CELLS,
    OUTAGE_CELLS,
    PROOF_CELLS,
    READING_CELLS,
    SPLIT_CELLS,
    TCP_CELLS,
    TORN_CELLS,
    Cell,
)
from tests.chaos.playing import parameters, play

pytestmark = [pytest.mark.mpi]


ALL = (
    *CELLS,
    *TORN_CELLS,
    *DOUBT_CELLS,
    *SPLIT_CELLS,
    *TCP_CELLS,
    *READING_CELLS,
    *GROWTH_CELLS,
    *OUTAGE_CELLS,
    *PROOF_CELLS,
)


@pytest.mark.parametrize("cell", parameters(cell for cell in ALL if not cell.regular))
def test_kill_matrix_cell_loses_no_checkpoint(
    cell: Cell, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    play(cell, request, tmp_path)
