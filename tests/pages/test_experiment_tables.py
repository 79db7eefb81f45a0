"""Tables and verdicts of experiments, from documents with known results."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import papers
from benchmarks.behind import behind
from benchmarks.experiments import epochs, interference, models, stager_size, table, tiered
from benchmarks.experiments.makespan import utilisation
from benchmarks.grid import Grid


def _verdict(experiment: str, place: str, document: dict[str, Any]) -> tuple[str, str]:
    (row,) = (of for of in papers.RESULTS if of.experiment == experiment and of.place == place)
    return row.judge(document)


def _interfered(adaptive: float, static: float) -> dict[str, Any]:
    of = {"nothing saved": 1.0, "alone": 1.02, "static": static, "adaptive": adaptive}
    runs = [
        {
            "name": name,
            "round": number,
            "iteration_seconds": [9.0, *[scale * seconds] * 4],
            "saved": [] if name == "nothing saved" else [0, 3],
        }
        for number, scale in enumerate((1.0, 2.0))  # each round is compared with its own plain run
        for name, seconds in of.items()
    ]
    return {"runs": runs, "left": 1 / 3, "write_seconds": 0.5, "iteration_seconds": 0.05}


def test_the_adaptive_interval_is_judged_beside_the_same_rounds_plain_run() -> None:
    document = _interfered(adaptive=1.1, static=2.0)
    static = interference.overheads(document, "static")
    assert (static.least, static.median, static.greatest) == pytest.approx((1.0, 1.0, 1.0))
    assert _verdict("interference", "policy", document)[0] == "reproduced"
    assert _verdict("interference", "policy", _interfered(2.0, 1.1))[0] == "not reproduced"
    assert _verdict("interference", "abstract", document)[0] == "reproduced"
    (grid,) = interference.grids(document)
    assert [row[0] for row in grid.rows] == ["nothing saved", "alone", "static", "adaptive"]
    assert [row[4] for row in grid.rows] == ["", "3, 3", "3, 3", "3, 3"]


def _sized() -> dict[str, Any]:
    def cell(cpus: float, memory_bytes: int, seconds: list[float]) -> dict[str, Any]:
        rounds = [{"staged_seconds": value, "done_seconds": 2 * value} for value in seconds]
        return {"cpus": cpus, "memory_bytes": memory_bytes, "ring_bytes": 50, "rounds": rounds}

    cells = [cell(0.5, 1 << 30, [4.0, 9.0]), cell(2.0, 1 << 30, [1.0, 3.0]), cell(2.0, 4 << 30, [1.0, 1.0])]
    return {"image_bytes": 100, "cells": cells}


def test_a_stagers_size_is_held_against_the_most_cpus_with_the_same_memory() -> None:
    times = stager_size.times_as_long(_sized(), "staged_seconds")
    assert (times[0.5, 1 << 30].least, times[0.5, 1 << 30].greatest) == (3.0, 4.0)
    assert times[2.0, 4 << 30].median == 1.0
    assert stager_size.dollars_an_hour(0.5, 1 << 30) == pytest.approx(0.024685)
    (grid,) = stager_size.grids(_sized())
    assert grid.rows[0][:2] == ("0.5 CPUs, 1 GiB, ring 0.5 images", "0.0247")
    assert "0.5 CPUs, 1 GiB, $0.025/h: staged 3.5" in _verdict("stager-size", "fig. 12, table 3", _sized())[1]


def _models(mlc_base: list[float]) -> dict[str, Any]:
    def figures(seconds: float) -> dict[str, float]:
        return {"stall_seconds": 0.1, "staged_seconds": seconds, "done_seconds": seconds}

    return {
        "left_out": ["bert-large"],
        "models": {
            f"model{number}": {
                "image_bytes": 10**9,
                "parameters": 10**8,
                "rounds": [
                    {"holdfast": figures(1.0), "torch.save+fsync": figures(2.0), "mlc-base": figures(theirs)}
                ],
                "phases": {},
            }
            for number, theirs in enumerate(mlc_base)
        },
    }


@pytest.mark.parametrize(
    ("mlc_base", "verdict"), [([2.0, 3.0], "beaten"), ([2.0, 1.5], "in part"), ([1.5, 0.5], "not reproduced")]
)
def test_ten_models_are_held_against_what_acute_claims_of_each(mlc_base: list[float], verdict: str) -> None:
    document = _models(mlc_base)
    assert _verdict("models", "table 2", document)[0] == verdict
    assert "1 GB 2.0, 1 GB 2.0" in _verdict("models", "fig. 11", document)[1]
    assert behind({**document, "experiment": "models"}) == (
        "**Here holdfast is behind:** model1, durable: 1.000 s against mlc-base 0.500 s."
        if 0.5 in mlc_base
        else ""
    )
    figures, ratios, _ = models.grids(document)
    assert figures.title.endswith("no time was left for bert-large")
    assert figures.rows[0] == (
        "model0, 100.0 M, 1.00 GB",
        *["0.100 (0.100–0.100)", *["1.000 (1.000–1.000)"] * 2],
    )
    assert ratios.rows[0][-1] == f"{mlc_base[0]:.1f} ({mlc_base[0]:.1f}–{mlc_base[0]:.1f})"


def _gated(layered: float, coarse: float) -> dict[str, Any]:
    runs = [
        {
            "every": 5,
            "coarse": held,
            "tier": 1 + stall,
            "none": 1.0,
            "stall_seconds": stall,
            "copy_seconds": 0.3,
            "seconds": 0.05,
            "update": 0.15,
        }
        for held, stall in ((False, layered), (True, coarse))
    ]
    plain = {"every": 1, "coarse": False, "tier": 1.5, "none": 1.0, "stall_seconds": 0.1}
    of_nvme = {"tier": "nvme", "in_flight": 1, "writers": 1, "runs": [plain], "restore_seconds": [1.0]}
    of_memory = {"tier": "memory", "in_flight": 1, "writers": 1, "runs": runs, "restore_seconds": [1.0]}
    return {"experiment": "tiered", "runs": [of_nvme, of_memory]}


def test_gates_are_compared_where_both_were_measured() -> None:
    ahead, after = _gated(0.05, 0.2), _gated(0.2, 0.1)
    assert [(of["tier"], every) for of, every in tiered.gated(ahead)] == [("memory", 5)]
    assert _verdict("tiered", "figs. 10, 11", ahead)[0] == "reproduced"
    assert _verdict("tiered", "figs. 10, 11", after)[0] == "not reproduced"
    assert behind(ahead) == ""
    assert "memory, every 5, layer-wise gate: 20.0 % against the coarse gate 10.0 %" in behind(after)
    _, gates, _ = tiered.grids(ahead)
    assert gates.rows[0][-2:] == ("0.25 (0.25–0.25)", "300 (300–300)")


def test_a_peer_that_keeps_in_memory_has_no_time_until_durable() -> None:
    figures = {"stall_seconds": 0.1, "staged_seconds": 1.0, "done_seconds": 1.0}
    rounds = [
        {"holdfast": {**figures, "done_seconds": 2.0}, "torch.save+fsync": figures, "gemini-like": figures}
    ]
    document = {"experiment": "table", "rounds": rounds, "image_bytes": 10**9, "phases": {}}
    document |= {"memory": {"ranks": {}}, "idle_cpu_percent": {}, "ring_bytes": 1}
    rows = {row[0]: row for row in table.grids(document)[0].rows}
    assert rows["gemini-like"][2:4] == ("1.000 (1.000–1.000)", "")
    assert "gemini-like" not in behind(document)
    assert "durable: 2.000 s against torch.save+fsync 1.000 s" in behind(document)


def _epochs(once: float, often: float) -> dict[str, Any]:
    """Make a document from the seconds of holdfast's iterations by interval; without saves they take 0.1 s."""

    def run(peer: str, every: int, seconds: float) -> dict[str, Any]:
        took = {"makespan_seconds": 10 * seconds, "durable_seconds": 10 * seconds}
        return {"peer": peer, "round": 0, "every": every, "iterations": 10, "saves": 2, **took}

    runs = [run("none", every, 0.1) for every in (epochs.OFTEN, epochs.EPOCH)]
    runs += [run("holdfast", epochs.EPOCH, once), run("holdfast", epochs.OFTEN, often)]
    runs += [run(peer, epochs.EPOCH, 0.2) for peer in ("torch.save+fsync", "mlc-base")]
    saves = [
        {"peer": "holdfast", "staged_seconds": 0.2, "done_seconds": 0.5},
        {"peer": "torch.save+fsync", "done_seconds": 1.0},
        {"peer": "mlc-base", "staged_seconds": 2.0, "done_seconds": 3.0},
    ]
    sized = {"iteration_seconds": 0.1, "image_bytes": 10**9}
    return {"experiment": "epochs", "runs": runs, "saves": saves, **sized}


@pytest.mark.parametrize(
    ("once", "often", "of_acute", "of_checkfreq"),
    [
        (0.1005, 0.1008, "beaten", "reproduced"),
        (0.1005, 0.103, "reproduced", "reproduced"),
        (0.1005, 0.104, "reproduced", "not reproduced"),
        (0.102, 0.104, "not reproduced", "not reproduced"),
    ],
)
def test_often_is_held_against_once_an_epoch(
    once: float, often: float, of_acute: str, of_checkfreq: str
) -> None:
    document = _epochs(once, often)
    assert _verdict("epochs", "fig. 7, once an epoch", document)[0] == of_acute
    verdict, text = _verdict("epochs", "abstract, recovery", document)
    assert verdict == of_checkfreq
    assert "a kill loses 0.45 (" in text  # half of 5 iterations, plus the time until staged
    assert "loses 6.00 (" in text  # half of 100, plus the time until durable
    assert behind(document) == ""
    (grid,) = epochs.grids(document)
    assert [row[0] for row in grid.rows] == [
        *(f"{peer}, once an epoch" for peer in ("holdfast", "torch.save+fsync", "mlc-base")),
        "holdfast, every 5",
    ]
    assert utilisation(document["runs"], "holdfast", epochs.OFTEN, 0.1).median == pytest.approx(0.1 / often)
    assert utilisation(document["runs"], "none", None, 0.1).median == pytest.approx(1)


@pytest.mark.parametrize(("eight", "verdict"), [(2.2, "reproduced"), (1.8, "not reproduced")])
def test_contention_is_that_ranks_beyond_the_stagers_link_are_no_faster(eight: float, verdict: str) -> None:
    cells = [
        {"ranks": ranks, "wide_as": 4, "image_bytes": 10, "rounds": [{"staged_seconds": seconds}]}
        for ranks, seconds in ((8, eight), (1, 8.0), (4, 2.0))
    ]
    wider = {"ranks": 8, "wide_as": 8, "image_bytes": 10, "rounds": [{"staged_seconds": 1.0}]}
    found, text = _verdict("shards", "V-E", {"cells": [*cells, wider]})
    assert found == verdict
    assert text.endswith(f": 8 ranks {eight / 2:.2f}")


def test_results_that_fall_short_are_named_first_below_the_table() -> None:
    rows = tuple(
        (name, "claim", verdict)
        for name, verdict in (("A, fig. 1", "in part"), ("B", "beaten"), ("C", "not reproduced"))
    )
    said = papers.shortfalls(Grid("", ("result", "what it says", "here"), rows))
    assert said == "**Not reproduced:** C. **Reproduced in part:** A, fig. 1."
    assert papers.shortfalls(Grid("", ("result", "what it says", "here"), rows[1:2])) == ""
