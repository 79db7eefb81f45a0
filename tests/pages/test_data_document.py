"""The diff in docs/data.md equals the difference between the two loops of examples/nanogpt/."""

from __future__ import annotations

import difflib

from tests.pages.test_documents import blocks, text


def changes(plain: str, resumable: str) -> list[str]:
    """Return the lines that only one of the two `train`s has, ignoring indentation, which `with` changes."""
    first, second = (
        [
            line.strip()
            for line in text(f"examples/nanogpt/{name}.py").partition("\ndef train(")[2].splitlines()
        ]
        for name in (plain, resumable)
    )
    lines = difflib.unified_diff(first, second, n=0, lineterm="")
    return [line for line in lines if line[0] in "+-" and line.rstrip() not in ("---", "+++")]


def test_the_diff_of_the_page_is_that_of_the_scripts() -> None:
    (shown,) = blocks("docs/data.md", "diff")
    assert [line[0] + line[1:].strip() for line in shown.splitlines()] == [
        line for line in changes("train", "train_resumable") if "add_argument" not in line
    ]
    assert "holdfast" not in text("examples/nanogpt/train.py").partition('"""\n\n')[2]
