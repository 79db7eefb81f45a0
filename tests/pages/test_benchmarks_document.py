"""Pictures, tables and verdicts are arithmetic over the JSON: the same input gives the same bytes."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

_CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def test_committed_pictures_and_page_are_those_of_the_committed_figures(tmp_path: Path) -> None:
    # They bring torch's DTensors along, which takes a second: not in each worker.
    from benchmarks import document, drawing, results
    from benchmarks.experiments import EXPERIMENTS

    pinned = f"matplotlib=={importlib.metadata.version('matplotlib')}\n" in _CONSTRAINTS.read_text(
        encoding="utf-8"
    )
    for name, (measured, _, _) in drawing.PICTURES.items():
        shown = results.read(measured)
        if shown is not None and pinned:  # another matplotlib draws other bytes
            committed = drawing.FOLDER / f"{name}.svg"
            assert drawing.draw(name, shown, tmp_path).read_bytes() == committed.read_bytes(), (
                "run `make figures`"
            )
    page = document.PAGE.read_text(encoding="utf-8")
    documents = {name: results.read(name) for name in EXPERIMENTS}
    assert document.filled(page, documents) == page, "run `make figures`"
