"""docs/troubleshooting.md keeps up with the source: each error has a section, each quoted message still exists."""

from __future__ import annotations

import ast
import errno
import functools
import os
import re
from collections.abc import Iterator

import click

from holdfast import errors
from holdfast.command.cli import cli
from holdfast.errors import HoldfastError, help_for
from operator_side.commands.explain import section
from tests.pages.test_documents import ROOT, files, headings, text

PAGE = "docs/troubleshooting.md"
PACKAGES = ("holdfast/", "trainer_side/", "stager/", "flusher/", "operator_side/")
# Messages of mpirun and EC2. `os.strerror` gives those of the operating system.
OF_OTHERS = {
    "All nodes which are allocated for this job are already filled",
    "The PMIx server's listener thread failed to start",
}
VALUE = "\0"
_LOGGED_VALUE = re.compile(r"%[-0-9.]*[sdrgf]")
_LETTERS_MIN = 8  # shorter pieces, such as `s` or `of`, would be found anywhere

TOPICS = [*(getattr(errors, name).code for name in errors.__all__ if name != "HoldfastError"), "run"]


# -- sections ----------------------------------------------------------------------------------------------------------


def test_errors_lead_to_help_that_exists() -> None:
    for topic in TOPICS:
        (command, code), (page, anchor) = (
            re.findall(pattern, help_for(topic))[0]
            for pattern in (r"^(holdfast explain) (\w+) ", r"\((.+)#(\w+)\)$")
        )
        assert (command, code, page) == ("holdfast explain", topic, PAGE)
        assert anchor in headings(ROOT / page), topic
        assert len(section(code).splitlines()) > 3, topic


def test_a_section_says_its_class_and_exit_code() -> None:
    kinds: list[type[HoldfastError]] = [
        getattr(errors, name) for name in errors.__all__ if name != "HoldfastError"
    ]
    assert [
        kind.code
        for kind in kinds
        if not section(kind.code).startswith(
            f"## {kind.code}\n\n`{kind.__name__}`, exit code {kind.exit_code}."
        )
    ] == []


# -- messages ----------------------------------------------------------------------------------------------------------


def quoted() -> Iterator[str]:
    """Yield the messages that the page quotes, in bold and as code. A single word is a name."""
    for bold in re.findall(r"\*\*(.+?)\*\*", text(PAGE), re.DOTALL):
        yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+\s[^`]+)`", bold))


def pieces(message: str) -> list[str]:
    """Return the constant pieces of a message."""
    return [piece for part in message.split("…") if len(piece := part.strip()) >= _LETTERS_MIN]


@functools.cache
def said() -> str:
    """Return all strings of the source but docstrings, with `VALUE` for inserted values; and the system's messages."""
    found = [*OF_OTHERS, *map(os.strerror, errno.errorcode)]
    for name in sorted(files()):
        if name.startswith(PACKAGES) and name.endswith(".py"):
            found += strings(ast.parse(text(name)))
    return "\n".join(" ".join(_LOGGED_VALUE.sub(VALUE, string).split()) for string in found)


def strings(tree: ast.AST) -> Iterator[str]:
    """Yield the strings of a module; an implicit concatenation is one string."""
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
            yield "".join(
                part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else VALUE
                for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value


def test_every_message_that_the_page_quotes_is_still_said() -> None:
    messages = list(quoted())
    assert len(messages) > 50, "the pattern finds too few"
    assert [message for message in messages if not pieces(message)] == [], "quote more of it"
    stale = {message: piece for message in messages for piece in pieces(message) if piece not in said()}
    assert stale == {}, "nothing in the source says it like this; write … for what differs"


def test_commands_that_messages_name_exist() -> None:
    named = set(re.findall(r"`holdfast ([a-z]+)\b", said()))
    assert len(named) > 5, "the pattern finds too few"
    assert named <= set(cli.list_commands(click.Context(cli)))
