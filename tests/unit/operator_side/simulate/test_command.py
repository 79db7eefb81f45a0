"""`holdfast simulate` as a user calls it: tables, one JSON document, pictures, and errors that name the cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.command import cli
from operator_side.simulate.profiles import measured_profile
from tests.unit.operator_side.simulate.test_traces import COUNTS, NODES

_FEW = ("--offsets", "3", "--every", "1,20", "--iteration-seconds", "0.5")


@pytest.fixture(name="run")
def _run(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["simulate", *(str(argument) for argument in arguments)])
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return run


@pytest.fixture(name="traces")
def _traces(tmp_path: Path) -> tuple[Path, Path]:
    counts, nodes = tmp_path / "counts.csv", tmp_path / "nodes.csv"
    counts.write_text(COUNTS)
    nodes.write_text(NODES)
    return counts, nodes


def test_the_tables_have_every_strategy_interval_and_trace(run: Any, traces: tuple[Path, Path]) -> None:
    code, out, err = run(
        *traces, *_FEW, "--lead-seconds", "0,30", "--spot-price", "1", "--on-demand-price", "3"
    )
    assert (code, err) == (0, "")
    for word in ("counts.csv", "nodes.csv", "torch.save+fsync", "mlc-base", "holdfast, 30 s notice", "ideal"):
        assert word in out
    assert "iteration_seconds 0.5 as given" in out
    assert "python -m benchmarks" in out, "where the figures come from"
    assert "holdfast: every " in out
    assert "per preemption" in out
    assert "on demand, without losses and checkpoints: $" in out


def test_json_is_one_document_that_can_be_given_back(
    run: Any, traces: tuple[Path, Path], tmp_path: Path
) -> None:
    code, out, _ = run(traces[0], *_FEW, "--json")
    document = json.loads(out)
    assert code == 0
    (trace,) = document["traces"]
    assert (trace["losses"], trace["machines_max"], trace["offsets"]) == (1, 56, 3)
    assert len(trace["goodput"]) == 2 * len(measured_profile().strategies) + 1
    for row in trace["goodput"]:
        assert row["share"]["least"] <= row["share"]["median"] <= row["share"]["greatest"] <= 1
        assert row["dollars"] is None
    assert {advice["strategy"] for advice in trace["advice"]} == set(measured_profile().strategies)
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(document["profile"]))
    again = json.loads(run(traces[0], "--offsets", "3", "--every", "1,20", "--profile", profile, "--json")[1])
    assert again == document, "the profile and the seed decide everything"


def test_total_times_need_no_trace(run: Any) -> None:
    asked = ("--mtbf-hours", "0.5,8", "--nodes", "4", "--iterations", "5000", *_FEW)
    code, out, _ = run(*asked)
    assert code == 0
    assert "Hours until 5000 iterations are done" in out
    document = json.loads(run(*asked, "--json")[1])
    assert document["traces"] == []
    assert {total["mtbf_hours"] for total in document["totals"]} == {0.5, 8.0}


def test_pictures_are_drawn_and_the_same_each_time(
    run: Any, traces: tuple[Path, Path], tmp_path: Path
) -> None:
    drawn = []
    for name in ("once", "twice"):
        folder = tmp_path / name
        asked = ("--mtbf-hours", "0.5,8", "--nodes", "4", "--iterations", "500", "--figures", folder)
        code, out, _ = run(traces[0], *_FEW, *asked)
        assert code == 0
        assert "picture: " in out
        drawn.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert set(drawn[0]) == {"goodput-counts.csv.svg", "total-time.svg"}
    assert drawn[0] == drawn[1]
    assert b"checkfreq" in drawn[0]["goodput-counts.csv.svg"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "expected a TRACE to replay"),
        (("nothing.csv",), "nothing.csv: cannot be read"),
        (("COUNTS", "--every", "0"), "--every 0: expected whole numbers from 1"),
        (("COUNTS", "--every", "1.5"), "--every 1.5: expected whole numbers"),
        (("COUNTS", "--lead-seconds", "-1"), "--lead-seconds -1: expected numbers from 0"),
        (("COUNTS", "--lead-seconds", "nan"), "expected numbers from 0"),
        (("COUNTS", "--window-hours", "5"), "expected a window of at most 0.07 h"),
        (("COUNTS", "--nodes", "2", "--nodes-min", "3"), "nodes_min: expected 1 to 2"),
        (("COUNTS", "--spot-price", "1"), "expected --spot-price and --on-demand-price together"),
        (("COUNTS", "--profile", "nothing.json"), "nothing.json: cannot be read"),
        (("--mtbf-hours", "1"), "expected --nodes and --iterations"),
        (
            ("--mtbf-hours", "0.001", "--nodes", "2", "--iterations", "1000000000"),
            "expected at most 1000000 of them",
        ),
        (("COUNTS", "--figures", "COUNTS"), "--figures "),
    ],
)
def test_wrong_arguments_are_explained(
    run: Any,
    traces: tuple[Path, Path],
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [str(traces[0]) if argument == "COUNTS" else argument for argument in arguments]
    code, out, err = run(*given)
    assert (code, out) == (2, "")
    assert said in err
    code, out, _ = run(*given, "--json")
    assert json.loads(out)["error"]["code"] == "config"
    assert code == 2


def test_a_bound_that_one_strategy_cannot_keep_leaves_the_others_their_advice(
    run: Any, traces: tuple[Path, Path]
) -> None:
    code, out, _ = run(traces[0], *_FEW[:4], "--iteration-seconds", "0.00003")
    assert code == 0
    assert "torch.save+fsync: an overhead of at most 3.00%: not possible" in out
    assert "holdfast: every " in out


def test_the_help_has_an_example(run: Any) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert "holdfast simulate trace.csv --lead-seconds 0,30,120" in out
