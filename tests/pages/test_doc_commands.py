"""Every command in every page is one that its program takes, and is typed by a test or has a reason why it is not.

They are typed by tests/pages/test_pages.py, and those of the tutorial by tests/soak/test_tutorial.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.pages.test_documents import pages
from tests.support.doc_commands import (
    ELSEWHERE,
    LANGUAGES,
    PROGRAMS,
    fences,
    shown,
    spoken,
    why_not,
    why_not_spoken,
)
from tests.support.typing_pages import (
    EXIT_CODES,
    NOT_TYPED,
    SCENE,
    TYPED_ONCE,
    entry_for,
    plan,
)

_PLAIN_NAME = re.compile(r"\w[\w.-]*")


@pytest.fixture(autouse=True)
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In a directory of the reader's own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def with_files(text: str) -> str:
    """The same command; what may be a file beside it is there."""
    for word in text.split():
        if _PLAIN_NAME.fullmatch(word):
            Path(word).touch()
    return text


def test_commands_are_taken_by_what_they_are_for() -> None:
    wrong = []
    for page in pages():
        wrong += [f"{line}: {why}" for line in shown(page) if (why := why_not(with_files(line.text)))]
        wrong += [
            f"{page}: {text}: {why}" for text in spoken(page) if (why := why_not_spoken(with_files(text)))
        ]
    assert not wrong, "\n".join(wrong)


def test_no_command_hides_in_a_block_without_the_tag() -> None:
    all_fences = [(page, fence) for page in pages() for fence in fences(page)]
    hidden = [
        f"{page}:{number}: {line}; tag the block `sh`"
        for page, fence in all_fences
        if fence.language in {"", "text"}
        for number, line in enumerate(fence.lines, fence.number)
        if re.match(rf"({'|'.join(PROGRAMS | ELSEWHERE)}) (?! )", line) and "[OPTIONS]" not in line
    ]
    assert not hidden, "\n".join(hidden)
    assert [
        f"{page}: {fence.language}" for page, fence in all_fences if fence.language not in LANGUAGES
    ] == []


# -- what a test types -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [NOT_TYPED, EXIT_CODES, TYPED_ONCE])
def test_every_entry_is_about_a_command_of_a_page(table: Iterable[str]) -> None:
    texts = [line.text for page in pages() for line in shown(page)]
    assert [beginning for beginning in table if not any(text.startswith(beginning) for text in texts)] == []
    lines = [line for page in pages() for line in shown(page)]
    assert {*map(entry_for, lines)} - {""} == NOT_TYPED.keys(), "an entry that another one hides"


def test_every_name_of_the_scene_is_one_of_a_page() -> None:
    texts = [line.text for found in plan().values() for line in found]
    left = dict(SCENE)
    for text in texts:
        for pattern, meant in SCENE.items():
            if re.search(pattern, text):
                left.pop(pattern, None)
            text = re.sub(pattern, meant, text)
    assert not left
