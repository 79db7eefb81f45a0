"""docs/kill-matrix.md is the matrix that the code runs, and shows no run that failed."""

from __future__ import annotations

from tests.chaos.cells import CELLS, VICTIMS
from tests.chaos.table import GRIDS, PAGE, named_cells


def test_the_page_names_every_cell_and_no_other() -> None:
    said = named_cells(PAGE.read_text())
    expected = {(cell.stage.name, cell.victims.name, cell.how) for cell in CELLS}
    expected |= {(*place, "") for grid in GRIDS for place in grid.cells}
    assert set(said) == expected, "run `make chaos`, then `python -m tests.chaos.table`"
    assert all(held == ran for held, ran in said.values()), "a run that failed is not published, it is mended"


def test_regular_cells_have_every_stage_and_every_victim() -> None:
    assert len({cell.name for cell in CELLS}) == len(CELLS)
    regular = [cell for cell in CELLS if cell.regular]
    assert len(regular) == 9
    assert {cell.victims for cell in regular} == set(VICTIMS)
    assert {cell.ulfm for cell in regular} == {True, False}
    assert {"s3", "directory"} == {cell.store for cell in regular}
    for cell in CELLS:
        assert cell.stage.point in cell.stage.where
