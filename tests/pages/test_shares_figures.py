"""The table and verdicts of several stagers, from made-up requests of flushers and measurements of jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import targets
from benchmarks.experiments import shares
from benchmarks.store_requests import Request, commit, counted, read, round_trips

LEAD, MEMBER = 7, 8
MANIFEST = "step-000000002.json"
SHARES = ".holdfast/shares/a000001-s000000002"


def request(at: float, what: str, name: str = "", pid: int = LEAD) -> Request:
    return Request(pid, what, name, at, at + 0.5)


OF_TWO = [
    request(1, "write", f"{SHARES}.seal-1"),  # as if of an earlier checkpoint
    request(2, "write_part"),
    request(3, "create", f"{SHARES}.seal-1"),
    request(3.1, "write_part", pid=MEMBER),
    request(4, "read", f"{SHARES}.seal-2"),  # too early
    request(5, "create", f"{SHARES}.seal-2", MEMBER),
    request(6, "read", f"{SHARES}.seal-2"),
    request(6.1, "read", MANIFEST, MEMBER),
    request(6.2, "read", f"{SHARES}.seal-3"),
    request(7.2, "write", ".holdfast/writer-000001.json"),  # a heartbeat
    request(8, "resume"),
    request(9, "publish"),
    request(10, "create", MANIFEST),
    request(11, "delete", f"{SHARES}.start"),
]


def test_a_commit_begins_with_the_last_seal_and_ends_with_the_manifest() -> None:
    found = commit(OF_TWO, MANIFEST)
    assert [one.what for one in found] == ["read", "read", "resume", "publish", "create"]
    assert counted(found) == {"read": 2, "resume": 1, "publish": 1, "create": 1}


def test_requests_that_overlap_are_one_round_trip() -> None:
    assert round_trips(commit(OF_TWO, MANIFEST)) == 4
    assert round_trips([]) == 0
    chained = [request(1, "read"), request(1.4, "read"), request(1.8, "read")]
    assert round_trips(chained) == 2, "the third began after the first had ended"


def test_a_commit_of_one_stager_begins_with_its_last_part() -> None:
    alone = [one for one in OF_TWO if one.pid == LEAD and "share" not in one.name and one.what != "resume"]
    assert [one.what for one in commit(alone, MANIFEST)] == ["publish", "create"]


def test_a_manifest_that_nobody_wrote_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no flusher has written step-9\.json"):
        commit(OF_TWO, "step-9.json")
    with pytest.raises(ValueError, match="no part was written before it"):
        commit([one for one in OF_TWO if one.what != "write_part"], MANIFEST)


def test_noted_lines_are_read_back(tmp_path: Path) -> None:
    assert read(tmp_path / "none") == []
    (tmp_path / "noted").write_text('[7, "read", "a", 1.0, 2.0]\n[8, "publish", "", 3.0, 4.0]\n')
    assert read(tmp_path / "noted") == [
        Request(7, "read", "a", 1.0, 2.0),
        Request(8, "publish", "", 3.0, 4.0),
    ]


def figures(seconds: float, requests: int) -> dict[str, float]:
    return {
        "staged_seconds": seconds,
        "done_seconds": seconds + 0.1,
        "cpu_seconds": 0.2,
        "commit_requests": 2 * requests,
        "commit_round_trips": requests,
    }


def document(of_two: float, of_four: float, added: int) -> dict[str, Any]:
    seconds = {"1": 10.0, "2": of_two, "4": of_four, shares.OWN: 7.6}
    requests = {"1": 3, "2": 3 + added, "4": 3 + added, shares.OWN: 3}
    return {
        "stagers": {"1": 1, "2": 2, "4": 4, shares.OWN: 0},
        "stager_bits": 80_000_000,
        "image_bytes": 100_000_000,
        "shape": {"ranks": 4},
        "rounds": [{way: figures(seconds[way], requests[way]) for way in seconds}] * 2,
    }


@pytest.mark.parametrize(
    ("found", "met"),
    [(document(5.2, 2.7, 2), ["yes"] * 3), (document(6.2, 3.8, 3), ["no"] * 3)],
    ids=["met", "not met"],
)
def test_the_targets_of_several_stagers_are_judged(found: dict[str, Any], met: list[str]) -> None:
    rows = targets.grid({"shares": found}).rows
    assert [row[3] for row in rows] == met
    assert all("staged" in row[2] and "durable" in row[2] for row in rows[:2])


def test_the_table_has_a_row_for_each_way_with_its_ratio() -> None:
    (grid,) = shares.grids(document(5.2, 2.7, 1))
    one, two, _, own = grid.rows
    assert (one[2], two[2]) == ("", "0.52 (0.52–0.52)")
    assert [row[5] for row in grid.rows] == ["10.00", "5.00", "2.50", "7.50"], "rank 0 has a quarter itself"
    assert [two[-2:], own[-2:]] == [("8 (8–8)", "4 (4–4)"), ("6 (6–6)", "3 (3–3)")]
    assert shares.beyond_bytes(document(5.2, 2.7, 1)) == pytest.approx(0.3)
