"""tests/support/plain_words.py finds the sentences that `make lint` counts, and complains when a count changes."""

from __future__ import annotations

import pytest

from tests.support.plain_words import RECORDED, complaints, odd, prose


@pytest.mark.parametrize(
    "text",
    [
        "What is staged waits.",
        "It waits. So it is done.",
        "Args:\n    step: Of the checkpoint.\n    rank: The rank.",
        "A table:\n\n- Those that wait.",
        "| alarm | What is the case |",
        "## What may change",
        "The upload begins anew.",
        "It was the same to the bit.",
        "The rank, if there is none, waits.",
    ],
)
def test_odd_finds_a_sentence_of_the_pattern(text: str) -> None:
    assert len(odd(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "Staged checkpoints wait.",
        "It waits, so it is late.",
        "Whatever fails is retried.",
        "begin_anew: Retry.",
    ],
)
def test_odd_leaves_a_plain_sentence(text: str) -> None:
    assert odd(text) == []


def test_prose_tells_docstrings_comments_help_and_messages_apart() -> None:
    source = '''"""The module."""
@click.command("ls")
def ls():
    """The help."""
class StagerConfig:
    """The settings."""
attribute = 1
"""The attribute."""
# The comment.
raise ConfigError(f"the store at {url} is full" " today")
key = "two words"
'''
    assert [(place.kind, place.line, place.text) for place in prose(source, "a.py")] == [
        ("docstrings", 1, "The module."),
        ("docstrings", 8, "The attribute."),
        ("messages", 4, "The help."),
        ("messages", 6, "The settings."),
        ("messages", 10, "the store at X is full today"),
        ("comments", 9, "The comment."),
    ]


def test_complaints_tell_a_count_that_has_grown_and_one_that_has_fallen_unrecorded() -> None:
    recorded = {"docstrings": 100}
    assert (
        list(complaints({"docstrings": 100}, recorded))
        == list(complaints({"docstrings": 95}, recorded))
        == []
    )
    (more,) = complaints({"docstrings": 101}, recorded)
    assert "101 odd sentences, at most 100" in more
    (fewer,) = complaints({"docstrings": 94}, recorded)
    assert "only 94 odd sentences are left" in fewer


def test_no_odd_sentence_is_allowed_where_users_read() -> None:
    assert RECORDED["messages"] == RECORDED["README.md"] == RECORDED["docs/tutorial.md"] == 0
