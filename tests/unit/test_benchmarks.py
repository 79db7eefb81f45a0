"""The pure parts of the benchmarks: figures are only worth something if their arithmetic is right."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import memory, report
from benchmarks.hub import Hub, Link
from benchmarks.raw_direct import DirectWriter
from benchmarks.report import Spread
from benchmarks.schedule import turn

pytest.importorskip("psutil")


def _round(ours: float, theirs: float, *, raw: float = 0.1) -> dict[str, dict[str, float]]:
    return {
        "holdfast": {"stall_seconds": ours / 10, "staged_seconds": ours / 2, "done_seconds": ours},
        "torch.save+fsync": {"stall_seconds": theirs, "done_seconds": theirs},
        "raw_mpi": {"done_seconds": raw},
        "raw_direct": {"done_seconds": raw * 2, "threads": 2.0},
    }


def test_spread_is_median_least_and_greatest() -> None:
    assert report.spread([3.0, 1.0, 10.0]) == Spread(3.0, 1.0, 10.0)
    assert report.spread([1.0, 2.0]).median == 1.5


def test_spread_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no rounds"):
        report.spread([])


def test_ratios_compare_a_round_with_itself() -> None:
    # The machine is ten times slower in the second round, for both: the ratio does not see it.
    assert report.ratios([2.0, 20.0], [1.0, 10.0]) == Spread(2.0, 2.0, 2.0)


@pytest.mark.parametrize(("over", "under"), [([1.0], [1.0, 2.0]), ([1.0], [0.0])])
def test_ratios_refuse_what_cannot_be_compared(over: list[float], under: list[float]) -> None:
    with pytest.raises(ValueError, match=r"cannot be compared|no time"):
        report.ratios(over, under)


def test_a_round_is_as_slow_as_its_slowest_rank() -> None:
    figures = report.round_figures(
        [
            {"start": 10.0, "end": 12.0, "stall_seconds": 0.5, "marks": {"staged": 11.0, "mine": 1.0}},
            {"start": 10.5, "end": 11.0, "stall_seconds": 0.1, "marks": {"staged": 11.5}},
        ]
    )
    assert figures == {"stall_seconds": 0.5, "done_seconds": 2.0, "staged_seconds": 1.5}


def test_summary_has_every_ratio_the_right_way_round() -> None:
    summary = report.summarise([_round(1.0, 3.0), _round(2.0, 4.0), _round(1.0, 5.0)])
    assert summary["peers"]["holdfast"]["done_seconds"] == Spread(1.0, 1.0, 2.0)
    ratios = summary["ratios"]
    assert ratios["durable: torch.save+fsync / holdfast"] == Spread(3.0, 2.0, 5.0)
    assert ratios["stall: torch.save+fsync / holdfast"].median == pytest.approx(30.0)
    assert ratios["staged: holdfast / raw MPI"] == Spread(5.0, 5.0, 10.0)
    assert ratios["durable: holdfast / raw O_DIRECT"] == Spread(5.0, 5.0, 10.0)
    assert not any("raw_mpi / holdfast" in name for name in ratios)


def test_expectations_say_what_held_and_what_did_not() -> None:
    summary = report.summarise([_round(1.0, 1.9)])
    verdicts = report.expectations(summary, {"stager": 2.0, "flusher": 2.1, "trainer": 50.0})
    assert [verdict["held"] for verdict in verdicts] == [False, True, False]
    assert verdicts[0]["got"] == "1.90 (1.90–1.90) times"
    assert report.expectations({"ratios": {}}, {}) == []


def test_document_is_written_as_json_and_shown(tmp_path: Path) -> None:
    document: dict[str, Any] = {
        "settings": {"image_bytes": 2_000_000_000, "ranks": 2, "rounds": 1, "ring_bytes": 1 << 30},
        "summary": report.summarise([_round(1.0, 3.0)]),
        "memory": {
            "ranks": {"holdfast": {"extra_bytes": 5_000_000, "extra_peak_bytes": 6_000_000}},
            "stager": {"rss_bytes": 7_000_000, "uss_bytes": 4_000_000},
        },
        "idle_cpu_percent": {"stager": 0.5, "trainer": 1.25},
        "expectations": [{"what": "the moon is near", "got": "384 Mm", "held": False}],
    }
    report.write(tmp_path / "results" / "x.json", document)
    read = json.loads((tmp_path / "results" / "x.json").read_text())
    assert read["summary"]["peers"]["holdfast"]["done_seconds"] == {
        "median": 1.0,
        "least": 1.0,
        "greatest": 1.0,
    }
    console = Console(record=True, width=140, file=(tmp_path / "shown").open("w"))
    with console.file:
        report.render(document, console)
    shown = console.export_text()
    for expected in (
        "3.00 (3.00–3.00)",
        "2.00 GB image",
        "0.50 %",
        "1.25 %",
        "rank with holdfast",
        "raw_mpi",
    ):
        assert expected in shown


def test_what_is_not_for_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="object is not for JSON"):
        report.write(tmp_path / "x.json", {"x": object()})


def test_every_peer_is_once_at_every_place() -> None:
    peers = ["a", "b", "c"]
    orders = [turn(peers, number) for number in range(3)]
    assert [sorted(order) for order in orders] == [peers] * 3
    assert [sorted(order[place] for order in orders) for place in range(3)] == [peers] * 3
    assert turn(peers, 3) == peers
    assert turn([], 4) == []


def test_hub_asks_all_ranks_and_orders_their_answers(tmp_path: Path) -> None:
    def serve(rank: int) -> None:
        link = Link(hub.path, job="j", rank=rank)
        for order in link.orders():
            match order["do"]:
                case "fail":
                    link.answer({"error": "broken"})
                case "end" if rank == 1:
                    break
                case "nothing":
                    link.answer({})
                case _:
                    link.answer({"rank": rank, **order})
        link.close()

    with Hub(tmp_path / "hub") as hub:
        ranks = [threading.Thread(target=serve, args=(rank,)) for rank in (1, 0)]
        for rank in ranks:
            rank.start()
        hub.gather("j", 2)
        assert hub.ask("j", {"do": "x"}) == [{"rank": 0, "do": "x"}, {"rank": 1, "do": "x"}]
        with pytest.raises(RuntimeError, match=r"rank 0, order .*broken"):
            hub.ask("j", {"do": "fail"})
        assert hub.ask("j", {"do": "nothing"}) == [{}, {}]
        with pytest.raises(RuntimeError, match=r"rank 1, .*ended"):
            hub.ask("j", {"do": "end"})
    for rank in ranks:
        rank.join(10)
        assert not rank.is_alive()
    assert not hub.path.exists()


@pytest.mark.parametrize("threads", [1, 2])
def test_direct_writer_writes_all_bytes_and_leaves_nothing(
    tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    real, sizes = os.fsync, []

    def fsync(fd: int) -> None:
        sizes.append(os.fstat(fd).st_size)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    writer = DirectWriter(tmp_path, nbytes=3 * 65536 + 17, chunk_bytes=65536)
    try:
        assert writer.write(threads) > 0
    finally:
        writer.close()
    assert sizes == [3 * 65536 + 17]
    assert list(tmp_path.iterdir()) == []


def test_peak_follows_what_this_process_takes() -> None:
    if not memory.reset_peak():
        pytest.skip("the kernel does not let this process reset its peak RSS")
    before = memory.peak_bytes()
    taken = bytearray(b"x") * (64 << 20)
    assert memory.peak_bytes() - before > 48 << 20
    assert memory.resident_bytes(children=False) > len(taken)
