"""Fills the tables of docs/gpu.md, between markers, from the committed JSON of each run.

<!-- measured: h100-4422a1df machine -->    or `figures`, or `peers`
… <!-- end -->
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.gpu.report import GpuRun, figures, machine, markdown, peers_table

__all__ = ["PAGE", "fill", "filled"]

_ROOT = Path(__file__).resolve().parents[2]
PAGE = _ROOT / "docs" / "gpu.md"
_RUNS = _ROOT / "docs" / "figures" / "data" / "gpu"
_MARKED = re.compile(
    r"(<!-- measured: (?P<run>[a-z0-9-]+) (?P<what>[a-z]+) -->\n).*?(<!-- end -->)", re.DOTALL
)


def filled(text: str, runs: Path = _RUNS) -> str:
    """Return the page with the text between markers made again.

    Raises:
        ValueError: A marker names no run, or no table.
    """

    def fill_in(match: re.Match[str]) -> str:
        folder = runs / match["run"]
        if not folder.is_dir():
            raise ValueError(f"the page asks for the run {match['run']}, and there is no {folder}")
        run = GpuRun(folder)
        tables = {"machine": machine, "figures": lambda run: markdown(figures(run)), "peers": peers_table}
        if match["what"] not in tables:
            raise ValueError(f"the page asks for {match['what']!r}; there are {', '.join(tables)}")
        return f"{match[1]}{tables[match['what']](run)}\n{match[4]}"

    return _MARKED.sub(fill_in, text)


def fill(page: Path = PAGE) -> Path:
    """Fill the page in place."""
    page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    return page
