"""docs/kill-matrix.md is the matrix that the code runs, and shows no run that did not hold."""

from __future__ import annotations

from tests.chaos.cells import CELLS, VICTIMS
from tests.chaos.results import Result
from tests.chaos.table import GRIDS, PAGE, named_cells, render


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


def test_a_run_that_failed_is_shown_as_failed() -> None:
    cell = CELLS[0]
    page = render([Result(cell.name, True, 1.0, "a"), Result(cell.name, False, 1.0, "b")])
    assert named_cells(page)[cell.stage.name, cell.victims.name, cell.how] == (1, 2)
    assert named_cells(page)[CELLS[1].stage.name, CELLS[1].victims.name, CELLS[1].how] == (0, 0)


def test_a_part_of_which_nothing_was_run_stays_as_it_was() -> None:
    runs = [Result(name, True, 1.0, "a", commit="1a2b3c4") for grid in GRIDS for name in grid.cells.values()]
    page = render([Result(CELLS[0].name, True, 1.0, "a"), *runs])
    assert "runs at `1a2b3c4`" in page
    assert render([], page) == page
    again = render([Result(next(iter(GRIDS[-1].cells.values())), True, 1.0, "b", commit="5d6e7f8")], page)
    assert again != page
    assert again.split("\n## ")[:-1] == page.split("\n## ")[:-1]
    assert again.count("5d6e7f8") == 1
    assert all(f"| {row} |" in render([]) for grid in GRIDS for row, _ in grid.cells), (
        "0/0 of what nobody has run"
    )
