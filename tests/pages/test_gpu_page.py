"""docs/gpu.md agrees with the committed JSON of each run, missed targets included."""

from __future__ import annotations

import json

from benchmarks.gpu import page

RUNS = page.PAGE.parent / "figures" / "data" / "gpu"


def test_the_tables_of_the_page_are_those_of_the_json() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.filled(text) == text, "run `make figures`"
    for run in RUNS.iterdir():
        for what in ("machine", "figures"):
            assert f"<!-- measured: {run.name} {what} -->" in text, f"{run.name} is not on the page"


def test_the_json_names_no_folder_of_a_machine() -> None:
    for path in RUNS.rglob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert json.loads(text)
        assert not [word for word in ("/dev/shm/", "/tmp/", "/home/", "/root/", "/work/") if word in text], (
            path
        )
