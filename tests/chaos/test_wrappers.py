"""Wrappers of ranks that are killed (tests/chaos/wrappers.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.wrappers import WRAPPER_CELLS, WrapperCell, play_wrapper

pytestmark = [pytest.mark.mpi]


@pytest.mark.parametrize("cell", WRAPPER_CELLS, ids=lambda cell: cell.name)
def test_wrapper_cell(cell: WrapperCell, tmp_path: Path) -> None:
    play_wrapper(cell, tmp_path)
