"""The pure parts of the benchmarks: figures are only worth something if their arithmetic is right."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import cluster, memory, results
from benchmarks.cluster import Clusters, Shape, turn
from benchmarks.grid import Grid
from benchmarks.hub import Hub, Link
from benchmarks.raw_direct import DirectWriter, read_direct
from benchmarks.spread import Spread, percentile, ratios, round_figures, spread

pytest.importorskip("psutil")


def test_spread_is_median_least_and_greatest() -> None:
    assert spread([3.0, 1.0, 10.0]) == Spread(3.0, 1.0, 10.0)
    assert spread([1.0, 2.0]).median == 1.5
    assert Spread(0.015, 0.01, 0.02).text(1, times=100) == "1.5 (1.0–2.0)"


def test_spread_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no rounds"):
        spread([])


def test_ratios_compare_a_round_with_itself() -> None:
    # The machine is ten times slower in the second round, for both: the ratio does not see it.
    assert ratios([2.0, 20.0], [1.0, 10.0]) == Spread(2.0, 2.0, 2.0)


@pytest.mark.parametrize(("over", "under"), [([1.0], [1.0, 2.0]), ([1.0], [0.0])])
def test_ratios_refuse_what_cannot_be_compared(over: list[float], under: list[float]) -> None:
    with pytest.raises(ValueError, match=r"cannot be compared|no time"):
        ratios(over, under)


def test_percentile_is_one_of_the_values() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert [percentile(values, percent) for percent in (50, 95, 99, 100)] == [50.0, 95.0, 99.0, 100.0]
    assert percentile([7.0], 1) == 7.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_a_round_is_as_slow_as_its_slowest_rank() -> None:
    figures = round_figures(
        [
            {"start": 10.0, "end": 12.0, "stall_seconds": 0.5, "marks": {"staged": 11.0, "mine": 1.0}},
            {
                "start": 10.5,
                "end": 11.0,
                "stall_seconds": 0.1,
                "stall_cpu_seconds": 0.05,
                "marks": {"staged": 11.5},
            },
        ]
    )
    assert figures == {
        "stall_seconds": 0.5,
        "first_update_seconds": 0.0,
        "stall_cpu_seconds": 0.05,
        "done_seconds": 2.0,
        "staged_seconds": 1.5,
    }


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    document = {
        "rounds": [{"a": {"b": 1.23456789}}, {}],
        "spread": Spread(1.0, 0.5, 2.0),
        "long": ["x" * 60] * 3,
    }
    results.write(tmp_path / "results" / "x.json", document)
    read = results.read("x", tmp_path / "results")
    assert read == {
        "rounds": [{"a": {"b": 1.23457}}, {}],
        "spread": {"median": 1.0, "least": 0.5, "greatest": 2.0},
        "long": ["x" * 60] * 3,
    }
    assert results.read("y", tmp_path / "results") is None


def test_a_value_that_is_not_for_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="object is not for JSON"):
        results.write(tmp_path / "x.json", {"x": object()})


def test_a_grid_whose_row_does_not_fit_is_refused() -> None:
    assert Grid("t", ("a", "b"), (("1", "2|3"),)).markdown().endswith("| 1 | 2\\|3 |")
    with pytest.raises(ValueError, match="2 columns, and a row of 1"):
        Grid("t", ("a", "b"), (("1",),))


def test_every_peer_is_once_at_every_place() -> None:
    peers = ["a", "b", "c"]
    orders = [turn(peers, number) for number in range(3)]
    assert [sorted(order) for order in orders] == [peers] * 3
    assert [sorted(order[place] for order in orders) for place in range(3)] == [peers] * 3
    assert turn(peers, 3) == peers
    assert turn([], 4) == []


def test_a_job_is_kept_for_the_next_experiment_of_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    @contextlib.contextmanager
    def running(shape: Shape, progress: Callable[[str], None]) -> Iterator[Any]:
        told.append(f"start {shape.model}")
        try:
            yield SimpleNamespace(progress=progress)
        finally:
            told.append(f"end {shape.model}")

    monkeypatch.setattr(cluster, "running", running)

    def use(clusters: Clusters, model: str, *, fresh: bool = False) -> Any:
        with clusters.running(Shape(model), told.append, fresh=fresh) as made:
            return made

    with Clusters() as clusters:
        first = use(clusters, "a")
        assert use(clusters, "a") is first
        assert use(clusters, "a", fresh=True) is not first
        use(clusters, "b")
        with pytest.raises(ValueError, match="broken"), clusters.running(Shape("b"), told.append):
            raise ValueError("broken")
        use(clusters, "b")  # what failed is not used again
    assert told == ["start a", "end a", "start a", "end a", "start b", "end b", "start b", "end b"]


def test_a_toy_gets_a_ring_smaller_than_itself() -> None:
    toy, real = Shape("flat-24-3").fitted(), Shape("flat-150-600").fitted()
    assert toy.ring_bytes is not None
    assert toy.ring_bytes < 3 << 20
    assert real == Shape("flat-150-600")
    assert Shape("tiny", chunk_bytes=1 << 20).fitted().chunk_bytes == 1 << 20


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
        hub.dismiss("j")
        ranks[1].join(60)
        assert not ranks[1].is_alive()  # rank 0 has seen the end of its orders, while the hub is still there
    for rank in ranks:
        rank.join(60)
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


@pytest.mark.parametrize("threads", [1, 3])
def test_direct_read_reads_every_byte(tmp_path: Path, threads: int) -> None:
    (tmp_path / "x").write_bytes(b"x" * (5 * 65536 + 17))
    assert read_direct(tmp_path / "x", 65536, threads) > 0  # it counts the bytes itself


def test_peak_follows_what_this_process_takes() -> None:
    if not memory.reset_peak():
        pytest.skip("the kernel does not let this process reset its peak RSS")
    before = memory.peak_bytes()
    taken = bytearray(b"x") * (64 << 20)
    assert memory.peak_bytes() - before > 48 << 20
    assert memory.resident_bytes(children=False) > len(taken)
