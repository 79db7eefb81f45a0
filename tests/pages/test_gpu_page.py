"""docs/gpu.md says what the committed JSON of each run says, misses included."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.gpu import page
from benchmarks.gpu.report import Figure, GpuRun, figures, markdown

RUNS = page.PAGE.parent / "figures" / "data" / "gpu"
H100 = RUNS / "h100-9aff311"


def test_the_tables_of_the_page_are_those_of_the_json() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.filled(text) == text, "run `make figures`"
    for run in RUNS.iterdir():
        for what in ("machine", "figures"):
            assert f"<!-- measured: {run.name} {what} -->" in text, f"{run.name} is not on the page"


def test_another_figure_makes_another_page(tmp_path: Path) -> None:
    shutil.copytree(H100, tmp_path / "h100-9aff311")
    changed = tmp_path / "h100-9aff311" / "bandwidths.json"
    changed.write_text(changed.read_text().replace('"of_bare_pinned": 0.0685', '"of_bare_pinned": 0.7'))
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.filled(text, tmp_path) != text
    with pytest.raises(ValueError, match="no-such-run"):
        page.filled("<!-- measured: no-such-run figures -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match="'moon'"):
        page.filled("<!-- measured: h100-9aff311 moon -->\n<!-- end -->\n")


def test_a_target_that_was_missed_says_so() -> None:
    found = {one.figure: one for one in figures(GpuRun(H100))}
    stall = found["stall of 12.1 GB, device idle, ms/GB"]
    assert stall == Figure("stall of 12.1 GB, device idle, ms/GB", "at most 0.82", "5.97", False)
    assert "| **no** |" in markdown([stall])
    assert found["stall of 4.9 GB beside lm-resiliency"].met is False
    assert found["stall of 12.1 GB beside lm-resiliency"].met is True
    assert found["`save()` waits for queued work"].met is False
    assert found["torch.compile(optimizer.step)"].met is False
    assert found["tests/gpu"].met is False
    unknown = found["p99 of step times, a save every 10 steps, against without"]
    assert (unknown.measured, unknown.met) == ("not measured", None)


def test_the_json_names_no_folder_of_a_machine() -> None:
    for path in RUNS.rglob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert json.loads(text)
        assert not [word for word in ("/dev/shm/", "/tmp/", "/home/", "/root/", "/work/") if word in text], (
            path
        )
