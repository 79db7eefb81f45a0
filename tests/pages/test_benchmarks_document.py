"""Pictures, tables and verdicts are computed from the JSON alone: the same input gives the same bytes."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from benchmarks import document, drawing, papers, results
from benchmarks.experiments import EXPERIMENTS

pytest.importorskip("matplotlib")

_CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def test_committed_pictures_and_page_are_those_of_the_committed_figures(tmp_path: Path) -> None:
    pinned = f"matplotlib=={importlib.metadata.version('matplotlib')}\n" in _CONSTRAINTS.read_text(
        encoding="utf-8"
    )
    for name, (measured, _, _) in drawing.PICTURES.items():
        shown = results.read(measured)
        if shown is not None and pinned:  # other versions of matplotlib draw other bytes
            committed = drawing.FOLDER / f"{name}.svg"
            assert drawing.draw(name, shown, tmp_path).read_bytes() == committed.read_bytes(), (
                "run `make figures`"
            )
    documents = {name: results.read(name) for name in EXPERIMENTS}
    for path in document.PAGES:
        page = path.read_text(encoding="utf-8")
        assert document.filled(page, documents) == page, "run `make figures`"


def block(*names: str) -> str:
    return "".join(f"<!-- measured: {name} -->\n<!-- end -->\n" for name in names)


def test_figures_of_two_machines_under_one_heading_are_refused() -> None:
    table, restore = results.read("table"), results.read("restore")
    assert table is not None
    assert restore is not None
    restore["machine"] = table["machine"]
    elsewhere = {**restore, "machine": {**restore["machine"], "processor": "another"}}
    page = f"# Page\n{block('table')}## Both\n{block('table', 'restore')}"
    with pytest.raises(
        ValueError, match=r"'## Both': expected figures of one machine, got .*: table; .*: restore"
    ):
        document.filled(page, {"table": table, "restore": elsewhere})
    assert document.filled(page, {"table": table, "restore": restore})
    apart = f"## One\n{block('table')}### Other\n{block('restore')}"
    assert "cores of another" in document.filled(apart, {"table": table, "restore": elsewhere})


def test_a_table_names_command_date_commit_and_machine() -> None:
    restore = results.read("restore")
    assert restore is not None
    new = {**restore, "measured": {"date": "2030-01-02", "commit": "12345678"}}
    filled = document.filled(block("restore"), {"restore": new})
    assert "`python -m benchmarks restore`, measured 2030-01-02 at 12345678; 2 cores of " in filled


def test_targets_of_two_machines_stand_in_two_tables_and_share_no_limit() -> None:
    documents = {name: results.read(name) for name in ("table", "makespan")}
    table, makespan = documents["table"], documents["makespan"]
    assert table is not None
    assert makespan is not None
    here = document.filled(
        block("targets"), {"table": table, "makespan": {**makespan, "machine": table["machine"]}}
    )
    other = {**makespan, "machine": {**table["machine"], "processor": "another"}}
    apart = document.filled(block("targets"), {"table": table, "makespan": other})
    assert (here.count("**Targets"), apart.count("**Targets")) == (1, 2)
    assert ("are between two" in here, "are between two" in apart) == (True, False)


def test_where_holdfast_is_behind_the_first_sentence_below_the_table_says_so() -> None:
    restore = results.read("restore")
    assert restore is not None
    rows = [{"holdfast": {"seconds": ours}, "torch.load": {"seconds": 2.0}} for ours in (1.0, 3.0)]
    ahead, behind = ({**restore, "rounds": [of]} for of in rows)
    assert "behind" not in document.filled(block("restore 0"), {"restore": ahead})
    below = document.filled(block("restore 0"), {"restore": behind}).rpartition("|\n\n")[2]
    assert below.startswith(
        "**Here holdfast is behind:** restore: 3.000 s against torch.load 2.000 s.\n\n`python"
    )


def test_each_result_of_the_papers_has_a_verdict_and_what_is_not_measured_says_so() -> None:
    documents = {name: results.read(name) for name in EXPERIMENTS}
    rows = papers.grid(documents).rows
    verdicts = {"beaten", "reproduced", "in part", "not reproduced", "not measured yet", "not here"}
    assert {row[2] for row in rows} <= verdicts
    assert {row[0].partition(",")[0] for row in rows} == {"ACUTE", "LightCheck", "CheckFreq", "PCcheck"}
    assert len({row[0] for row in rows}) == len(rows)
    bare = papers.grid({}).rows
    assert {row[2] for row in bare} == {"not measured yet", "not here"}
