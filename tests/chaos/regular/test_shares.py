"""Several stagers, one file (tests/chaos/share_cells.py): a few cells."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.restarted_stagers import RESTART_CELLS, RestartCell, play_restart
from tests.chaos.share_cells import ALL_SHARE_CELLS, ShareCell
from tests.chaos.share_machines import play_shares, share_parameters, store_of
from tests.chaos.share_scenario import RANK_SHARE_CELLS, RankShareCell, play_rank_shares


@pytest.mark.parametrize("cell", share_parameters(cell for cell in ALL_SHARE_CELLS if cell.regular))
def test_share_cell(cell: ShareCell, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    play_shares(cell, tmp_path, store_of(cell, request, tmp_path))


@pytest.mark.mpi
@pytest.mark.parametrize(
    "cell", [cell for cell in RANK_SHARE_CELLS if cell.regular], ids=lambda cell: cell.name
)
def test_share_cell_with_ranks(cell: RankShareCell, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    play_rank_shares(cell, request, tmp_path)


@pytest.mark.parametrize("cell", [cell for cell in RESTART_CELLS if cell.regular], ids=lambda cell: cell.name)
def test_restart_cell(cell: RestartCell, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    play_restart(cell, request, tmp_path)
