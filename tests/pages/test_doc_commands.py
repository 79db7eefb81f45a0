"""Every command in every page is accepted by its program; tests/soak/test_tutorial.py runs the tutorial."""

from __future__ import annotations

import re
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

_PLAIN_NAME = re.compile(r"\w[\w.-]*")


@pytest.fixture(autouse=True)
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a new directory, as a reader would."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def with_files(text: str) -> str:
    """Return the command, after creating each word that may be a file in this directory."""
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
