"""The pages of docs/design are few, and each has a decision, what was rejected, and the tests that guard it."""

from __future__ import annotations

import re

import pytest

from tests.support.job import REPOSITORY

_FOLDER = REPOSITORY / "docs" / "design"
_PAGES = sorted(_FOLDER.glob("*.md"))


def test_design_pages_are_at_most_sixteen_and_numbered_without_a_gap() -> None:
    assert len(_PAGES) <= 16
    assert [page.name[:4] for page in _PAGES] == [f"{number:03}-" for number in range(1, len(_PAGES) + 1)]


def test_the_pages_have_at_most_8200_words_together() -> None:
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in _PAGES) <= 8200


@pytest.mark.parametrize("name", [page.name for page in _PAGES])
def test_a_page_states_decision_alternatives_and_guarding_tests(name: str) -> None:
    text = (_FOLDER / name).read_text(encoding="utf-8")
    parts = [text.find(f"**{part}") for part in ("Decision.**", "Why.**", "Rejected.**", "Guarded by**")]
    assert -1 not in parts, name
    assert parts == sorted(parts), name
    guards = re.findall(r"`(tests/[\w./]+)`", text[parts[-1] :])
    assert guards, name
    assert [guard for guard in guards if not (REPOSITORY / guard).exists()] == []
