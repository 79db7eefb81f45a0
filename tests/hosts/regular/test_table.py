"""The page of docs/ shows the recorded results, of existing stories."""

from __future__ import annotations

import re
from pathlib import Path

from tests.hosts import test_hosts
from tests.hosts.table import PAGE


def test_the_page_tells_stories_that_there_are() -> None:
    stories = re.findall(r'keep\(cluster, "([^"]+)"', Path(test_hosts.__file__).read_text())
    rows = [line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert len(stories) == 6
    assert rows[1:]
    assert set(rows[1:]) <= set(stories), "a story was renamed or removed: run `make hosts`"
