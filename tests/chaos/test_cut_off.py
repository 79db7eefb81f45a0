"""Flushers that are cut off from S3 while they are replaced, except the cell in tests/chaos/regular."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.cut_off import CUT_CELLS, CutCell, play_cut
from tests.support.s3_place import S3Place


@pytest.mark.s3
@pytest.mark.parametrize("cell", [cell for cell in CUT_CELLS if not cell.regular], ids=lambda cell: cell.name)
def test_cut_cell(cell: CutCell, swift_s3: S3Place, tmp_path: Path) -> None:
    play_cut(cell, swift_s3, tmp_path)
