"""The figures of docs/scaling.md are those that operator_side/simulate/scale.py computes."""

from __future__ import annotations

from benchmarks.on_paper import PAGE, filled


def test_the_page_is_what_is_computed() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert filled(text) == text, "run: python -m benchmarks.on_paper"
    assert text.count("<!-- computed: ") == text.count("<!-- end -->") == 8
