"""The page of docs/ says what was written down, of stories that there are."""

from __future__ import annotations

import re
from pathlib import Path

from tests.hosts import test_hosts
from tests.hosts.table import PAGE, render

_RESULT = {
    "scenario": "link down",
    "ranks": [3, 2],
    "at_seconds": {"launched": 4.26, "training": 9.0},
    "steps_done_again": 3,
    "rate": "200mbit",
    "cpus": 2,
    "memory_bytes": 8 << 30,
    "load": 1.5,
}


def test_a_phase_that_was_not_seen_stays_empty() -> None:
    page = render([_RESULT])
    assert "| link down | 3 → 2 |  |  | 4.3 |  |  | 9.0 | 3 |" in page
    assert "2 cores and 8 GiB" in page


def test_the_page_tells_stories_that_there_are() -> None:
    stories = re.findall(r'keep\(cluster, "([^"]+)"', Path(test_hosts.__file__).read_text())
    rows = [line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert len(stories) == 6
    assert rows[1:]
    assert set(rows[1:]) <= set(stories), "a story was renamed or removed: run `make hosts`"
