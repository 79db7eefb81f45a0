"""Pictures, tables and verdicts are arithmetic over the JSON: the same input gives the same bytes."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import document, drawing, results, targets
from benchmarks.experiments import EXPERIMENTS
from benchmarks.experiments.makespan import interval_under, overheads

pytest.importorskip("matplotlib")

_CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
_MACHINE = {
    "cores": 2,
    "processor": "a processor",
    "memory_bytes": 8 << 30,
    "file_system": "ext4",
    "kernel": "6",
    "python": "3.11",
    "versions": {"torch": "2.13", "openmpi": "5"},
}


def _run(peer: str, every: int, seconds: float, *, number: int = 0, saves: int = 2) -> dict[str, Any]:
    return {
        "peer": peer,
        "every": every,
        "round": number,
        "iterations": every * saves,
        "makespan_seconds": seconds,
        "durable_seconds": seconds,
        "cpu_seconds": 1.0,
        "saves": 0 if peer == "none" else saves,
    }


def _makespan() -> dict[str, Any]:
    runs = []
    for number in range(3):
        slow = 1 + number  # a machine that gets slower for everybody
        for every in (1, 10):
            plain = 0.2 * every * 2 * slow
            runs += [
                _run("none", every, plain, number=number),
                _run("holdfast", every, plain * 1.04, number=number),
                _run("checkfreq", every, plain + 2 * 0.3 * slow, number=number),
            ]
    return {
        "command": "python -m benchmarks makespan",
        "machine": _MACHINE,
        "iteration_seconds": 0.2,
        "runs": runs,
    }


def _table(stall: float) -> dict[str, Any]:
    def figures(seconds: float) -> dict[str, float]:
        return {"stall_seconds": stall * seconds, "done_seconds": seconds, "staged_seconds": seconds / 2}

    peers = {"holdfast": figures(1.0), "torch.save+fsync": {"stall_seconds": 4.0, "done_seconds": 4.0}}
    return {
        "command": "python -m benchmarks table",
        "machine": _MACHINE,
        "image_bytes": 2 << 30,
        "shape": {"ranks": 2, "ring_bytes": 1 << 30},
        "rounds": [peers, {**peers, "raw_mpi": {"done_seconds": 0.4}}],
        "memory": {
            "ranks": {"holdfast": {"extra_bytes": 1 << 30, "extra_peak_bytes": (1 << 30) + (65 << 20)}},
            "stager": {"rss_bytes": 1, "uss_bytes": 2},
        },
        "idle_cpu_percent": {"stager": 0.5, "trainer": 0.5},
        "phases": {"copy_seconds": {"median": 0.1, "least": 0.1, "greatest": 0.2}},
    }


def test_an_overhead_is_taken_beside_the_baseline_of_its_own_round() -> None:
    runs = _makespan()["runs"]
    value = overheads(runs, "holdfast", 1)
    assert value is not None
    assert (value.median, value.least, value.greatest) == pytest.approx((0.04, 0.04, 0.04))
    assert overheads(runs, "mlc-base", 1) is None


def test_the_shortest_interval_comes_from_what_a_checkpoint_costs() -> None:
    runs = [_run("none", 1, 0.4), _run("none", 10, 4.0)]
    runs += [_run("a", 1, 0.42), _run("b", 1, 0.9), _run("b", 10, 4.1), _run("c", 10, 5.0)]
    # 0.01 s a checkpoint: every iteration of 0.2 s affords that.
    assert interval_under(runs, "a", 0.2, 0.05) == pytest.approx(1.0)
    # 0.25 s back to back; with ten iterations for it 0.05 s, which every 5 would afford: it was measured from 10 on.
    assert interval_under(runs, "b", 0.2, 0.05) == pytest.approx(10.0)
    assert interval_under(runs, "c", 0.2, 0.05) == pytest.approx(50.0)


def test_verdicts_say_what_is_met_and_what_is_not() -> None:
    documents = {"makespan": _makespan(), "table": _table(0.03)}
    rows = {(row[0], row[1]): row[2:4] for row in targets.grid(documents).rows}
    assert rows["CST, GPT-2, device-like", "at most 1 % of torch.save+fsync"] == ("0.8 (0.8–0.8) %", "yes")
    assert rows["PGT-1: bandwidth of raw MPI", "at least 70 %"] == ("80 (80–80) %", "yes")
    assert rows["PGT-2 against torch.save+fsync", "4 times faster"] == ("4.0 (4.0–4.0) times", "yes")
    assert rows["makespan, GPT-2, every 10 iterations", "within 1 %"] == ("4.0 (4.0–4.0) %", "no")
    assert rows["memory of a rank, N = 1", "slice + 64 MiB"][1] == "no"
    assert rows["PGT-2 against MLC-base", "10 times faster"] == ("not measured", "")
    slower = {(row[0], row[1]): row[2:4] for row in targets.grid({"table": _table(0.05)}).rows}
    assert slower["CST, GPT-2, device-like", "at most 1 % of torch.save+fsync"] == ("1.2 (1.2–1.2) %", "no")


def test_the_machines_limit_stands_beside_the_verdict() -> None:
    table = _table(0.01)
    for figures in table["rounds"]:
        figures["raw_direct"] = {"done_seconds": 0.5}
        figures["raw_over"] = {"done_seconds": 0.5}
        figures["raw_pipeline"] = {"staged_seconds": 0.5, "done_seconds": 0.8}
    resnet = _makespan()
    theirs = [run for run in resnet["runs"] if run["peer"] == "holdfast"]
    resnet["runs"] += [{**run, "peer": "pccheck-like"} for run in theirs]
    resnet["runs"] = [{**run, "model": "resnet50", "every": 1} for run in resnet["runs"]]
    limits = {
        row[0]: row[4]
        for row in targets.grid({"table": table, "makespan": _makespan(), "workloads": resnet}).rows
    }
    assert limits["PGT-2 against torch.save+fsync"] == (
        "a bare pipeline is 5.0 (5.0–5.0) times faster; a raw write alone is 8.0 (8.0–8.0) times faster"
    )
    assert limits["makespan, GPT-2, every 2 iterations"] == (
        "0.4 s are between two; a bare pipeline takes 0.80 s; a raw write alone takes 0.50 s"
    )
    assert limits["PGT-2 against MLC-base"] == ""
    for how in ("a new file", "over an old file"):
        assert (
            limits[f"PGT-2: bandwidth of raw O_DIRECT, {how}"]
            == "bare copy, MPI and write in one pipeline: 62 (62–62) %"
        )
    assert limits["PGT-1: bandwidth of raw MPI"] == "bare copy, MPI and write in one pipeline: 80 (80–80) %"
    assert limits["makespan, ResNet-50, every iteration"].startswith(
        "with the bare copy and write of pccheck-like: "
    )
    assert limits["interval at 5 % overhead, torch.save"].endswith("; a raw write alone takes 0.50 s")


def test_a_table_from_another_machine_than_the_page_names_says_so() -> None:
    page = "<!-- measured: machine -->\n<!-- end -->\n<!-- measured: makespan 0 -->\n<!-- end -->\n"
    other = {**_makespan(), "machine": {**_MACHINE, "processor": "another one"}}
    assert (
        " on "
        not in document.filled(page, {"table": _table(0.01), "makespan": _makespan()}).split("`python")[1]
    )
    filled = document.filled(page, {"table": _table(0.01), "makespan": other})
    assert "`python -m benchmarks makespan` on another one\n" in filled


def test_stolen_time_stands_beside_the_command_where_it_was_counted() -> None:
    page = "<!-- measured: makespan 0 -->\n<!-- end -->\n"
    counted = {**_makespan(), "stolen_share": 0.1234}
    assert "makespan`, 12.3 % of the cores' time stolen by the host\n" in document.filled(
        page, {"makespan": counted}
    )
    assert "makespan`\n" in document.filled(page, {"makespan": _makespan()})


def test_the_page_is_filled_between_its_markers_and_nowhere_else() -> None:
    page = "before\n<!-- measured: makespan 0 -->\nan older table\n<!-- end -->\nafter\n"
    page += "<!-- measured: s3 -->\n<!-- end -->\n<!-- drawn: intervals s3 -->\n![an older one](x.svg)\n<!-- end -->\n"
    once = document.filled(page, {"makespan": _makespan()})
    assert once.startswith("before\n<!-- measured: makespan 0 -->\n**Overhead in percent")
    assert "an older table" not in once
    assert "| holdfast | 4.0 (4.0–4.0) | 4.0 (4.0–4.0) |" in once
    assert "`python -m benchmarks makespan`\n<!-- end -->\nafter" in once
    assert "Not measured: `python -m benchmarks s3`." in once
    assert re.findall(r"figures/\w+\.svg|x\.svg", once) == ["figures/intervals.svg"], (
        "a picture that nobody has drawn"
    )
    assert document.filled(once, {"makespan": _makespan()}) == once
    with pytest.raises(ValueError, match="the page asks for the picture 'moon'"):
        document.filled("<!-- drawn: moon -->\n<!-- end -->\n", {})
    with pytest.raises(ValueError, match="the page asks for 'moon'"):
        document.filled("<!-- measured: moon -->\n<!-- end -->\n", {})


def test_committed_pictures_and_page_are_those_of_the_committed_figures(tmp_path: Path) -> None:
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
