"""The frame of all pages: readable colours, content policy, the unmodified chart library."""

from __future__ import annotations

import hashlib
import re
from importlib import resources
from typing import Any, get_args

import pytest

from operator_side.page.chart import Chart, Colour, Series, Span
from operator_side.page.render_page import render_page
from tests.unit.operator_side.page.reading import contrast, loads_nothing, policy_of, style_of

_CHART_JS_SHA256 = "87364cc2b2a76a6684929e7d6b80b18a897794db38400caff1fcf1791c6925d2"


def frame(every: float | None = None) -> str:
    return render_page("page/page.html", every=every, fragment="main").decode()


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_colours_have_enough_contrast(is_dark: bool) -> None:
    light, _, dark = style_of(frame()).partition("@media (prefers-color-scheme:dark)")
    colours = dict(re.findall(r"--(\w+):(#\w{6});", dark if is_dark else light))
    meanings = [colours[name] for name in get_args(Colour)]
    assert len(set(meanings)) == len(meanings)
    for behind in ("paper", "panel"):
        for text in ("ink", "faint", "link"):
            assert contrast(colours[text], colours[behind]) >= 4.5, (text, behind)
        for name in get_args(Colour):
            assert contrast(colours[name], colours[behind]) >= 3, (name, behind)


def test_a_page_may_ask_nobody_and_a_live_one_its_own_server_alone() -> None:
    loads_nothing(frame())
    assert policy_of(frame())["connect-src"] == "'none'"
    assert policy_of(frame(1.0))["connect-src"] == "'self'"
    assert policy_of(frame(1.0))["default-src"] == "'none'"


def test_the_chart_library_is_the_published_file() -> None:
    """npm's chart.js 4.6.1, dist/chart.umd.min.js; its licence lies beside it."""
    vendor = resources.files("operator_side.page") / "vendor"
    data = (vendor / "chart.umd.min.js").read_bytes()
    assert hashlib.sha256(data).hexdigest() == _CHART_JS_SHA256
    assert b"</script" not in data
    assert "MIT License" in (vendor / "chart-license.md").read_text()


def test_a_chart_is_empty_until_there_is_something_to_see() -> None:
    assert Chart("c", "", "step", [Series("loss", "training", points=[(1, 2.0)])]).is_empty, (
        "a point is no line"
    )
    assert not Chart("c", "", "step", [Series("loss", "training", points=[(1, 2.0), (2, 1.0)])]).is_empty
    chart = Chart("c", "", "time", [Series("job", "lost", [Span("job", 1, 1, "\x1b[2J")])], lanes=["job"])
    assert not chart.is_empty
    series: Any = chart.document()["series"]
    assert series[0]["data"] == [{"x": [1, 1], "y": "job", "text": "\\x1b[2J"}]


def test_a_chart_names_its_marks_and_nothing_that_it_does_not_draw() -> None:
    line, kills = Series("loss", "training", points=[(1, 2.0), (2, 1.0)]), Series("killed", "lost", marks=[2])
    series: Any = Chart("c", "", "step", [line, kills, Series("bad", "lost")]).document()["series"]
    assert [(one["name"], one["marks"]) for one in series] == [("loss", []), ("killed", [2])]
    assert Chart("c", "", "step", [kills]).is_empty, "marks without a line tell nothing"
