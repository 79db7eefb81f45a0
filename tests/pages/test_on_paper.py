"""docs/scaling.md has what operator_side/simulate/scale.py computes, and nothing typed by hand."""

from __future__ import annotations

import pytest

from benchmarks.on_paper import PAGE, filled


def test_the_page_is_what_is_computed() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert filled(text) == text, "run: python -m benchmarks.on_paper"
    assert text.count("<!-- computed: ") == text.count("<!-- end -->") == 6


def test_a_figure_that_is_typed_in_is_put_right() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert filled(text.replace("| 5,007 |", "| 1 |")) == text != text.replace("| 5,007 |", "| 1 |")


def test_a_table_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="asks for 'moon'; there are load"):
        filled("<!-- computed: moon -->\n<!-- end -->")
