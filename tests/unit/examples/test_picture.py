"""The demo's picture: readable on light pages and on dark ones, which it follows."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from examples.demo.picture import draw
from tests.support.job import REPOSITORY
from tests.unit.operator_side.page.reading import contrast

_LIGHT, _DARK = ("#ffffff",), ("#0d1117", "#1e2129")  # of code hosts and of the site


def drawn(folder: Path) -> str:
    """Return the picture of a demo of ten steps."""
    steps = [SimpleNamespace(step=step, loss=3.0 - step / 10) for step in range(10)]
    outcome: Any = SimpleNamespace(
        plan=SimpleNamespace(ranks=2, steps=10),
        reference=SimpleNamespace(steps=steps),
        killed=SimpleNamespace(steps=steps[:6]),
        resumed=SimpleNamespace(steps=steps[4:]),
    )
    assert draw(outcome, folder / "loss.svg")
    return (folder / "loss.svg").read_text(encoding="utf-8")


def test_picture_has_enough_contrast_on_light_and_dark_pages(tmp_path: Path) -> None:
    for svg in (drawn(tmp_path), (REPOSITORY / "docs/figures/demo.svg").read_text(encoding="utf-8")):
        style, _, body = svg.partition("</style>")
        rule = r'\[style\*="(fill|stroke): (#\w{6})"\]\{\1: (#\w{6}) !important\}'
        dark = {
            (name, light): colour
            for name, light, colour in re.findall(rule, style.partition("(prefers-color-scheme: dark)")[2])
        }
        used = set(re.findall(r"(fill|stroke): (#\w{6})", body))
        texts = set(re.findall(r'<g style="(fill): (#\w{6})" transform', body))
        assert texts
        assert len(used) == 5
        for element in used:
            least = 4.5 if element in texts else 2
            assert min(contrast(element[1], page) for page in _LIGHT) >= least, element
            assert min(contrast(dark[element], page) for page in _DARK) >= least, element
