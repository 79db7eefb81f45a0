"""Counts sentences that an ML engineer would not write; `make lint` lets the counts only fall.

    python -m tests.support.plain_words           # fails where a count differs from what is recorded here
    python -m tests.support.plain_words --list    # each such sentence, with its place

The subject of a sentence is a thing with a name: do not begin with a pronoun that stands for a relative clause ("What
is written …", "Those that …"), and use field words instead of idioms: "retry", not a second beginning.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeGuard

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("holdfast", "trainer_side", "stager", "flusher", "operator_side")
# Only docstrings are read there: newcomers read those.
CHECKS = (
    "tests",
    "benchmarks",
)

OPENING = re.compile(r"(?:What|Who|Whoever|Those|Of|So)\b")
IDIOM = re.compile(r"\b(?:anew|in vain|at one go|is none|so many|likewise|to the bit)\b", re.IGNORECASE)

# The number of such sentences, which may only fall: if you remove more than SLACK, write the new count here.
RECORDED = {
    "docstrings": 0,
    "docstrings of tests and benchmarks": 0,
    "comments": 0,
    "messages": 0,
    "README.md": 0,
    "docs/tutorial.md": 0,
    "docs/architecture.md": 0,
}
SLACK = 5
MESSAGE_WORDS_MIN = 3  # a shorter string is a name or a key


class Place(NamedTuple):
    """A piece of prose in a file; `kind` is a key of RECORDED."""

    kind: str
    path: str
    line: int
    text: str


def sentences(text: str) -> Iterator[str]:
    """The sentences of a docstring, a comment, a message or a page.

    A sentence also begins after a blank line, a list marker, the bar of a table, and a label such as `name:`.
    """
    for block in re.split(r"\n\s*\n|\n\s*(?:[-*#]+|\d+\.)\s+|\s*\|\s*", text):
        for line in re.split(r"\n\s*(?=[\w`]+(?: \([^)]*\))?: )", block):
            words = re.sub(r"^[-*#>]*\s*(?:[\w`.]+(?: \([^)]*\))?: +)?", "", " ".join(line.split()))
            yield from (one for one in re.split(r"(?<=[.!?])[*)\"'`]*\s+", words) if one)


def odd(text: str) -> list[str]:
    """The sentences of a text that match the pattern."""
    return [one for one in sentences(text) if OPENING.match(one.lstrip("*_(\"'`")) or IDIOM.search(one)]


def prose(source: str, path: str) -> Iterator[Place]:
    """All prose of a source file: docstrings, comments, and the strings that a program prints."""
    tree = ast.parse(source)
    helps = {id(node.body[0]) for node in ast.walk(tree) if _is_help(node)}
    silent: set[int] = set()  # strings that no program prints: docstrings, and the pieces of an f-string
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str() as text) as found):
                silent.add(id(found))
                yield Place("messages" if id(node) in helps else "docstrings", path, node.lineno, text)
            case ast.JoinedStr(values=parts):
                silent.update(map(id, parts))
    for node in ast.walk(tree):
        match node:
            case ast.JoinedStr(values=parts):
                shown = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in parts)
            case ast.Constant(value=str() as text) if id(node) not in silent:
                shown = text
            case _:
                continue
        if len(shown.split()) >= MESSAGE_WORDS_MIN:
            yield Place("messages", path, node.lineno, shown)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Place("comments", path, token.start[0], token.string.lstrip("# "))


def _is_help(node: ast.AST) -> TypeGuard[ast.FunctionDef | ast.ClassDef]:
    """Whether `--help` shows the docstring: that of a command, or of a class of settings."""
    match node:
        case ast.FunctionDef(decorator_list=decorators):
            return any(re.search(r"\.(command|group)\(", ast.unparse(one)) for one in decorators)
        case ast.ClassDef(name=name):
            return name.endswith("Config")
    return False


def everything(root: Path = ROOT) -> Iterator[Place]:
    """All prose that is counted."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            yield from prose(path.read_text(encoding="utf-8"), str(path.relative_to(root)))
    for folder in CHECKS:
        for path in sorted((root / folder).rglob("*.py")):
            for place in prose(path.read_text(encoding="utf-8"), str(path.relative_to(root))):
                if place.kind == "docstrings":
                    yield place._replace(kind="docstrings of tests and benchmarks")
    for name in RECORDED:
        if (root / name).suffix == ".md":
            text = (root / name).read_text(encoding="utf-8")
            yield Place(name, name, 1, re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def complaints(found: Mapping[str, int], recorded: Mapping[str, int]) -> Iterator[str]:
    """Describe each wrong count: one that has grown, or has fallen without being recorded."""
    for kind, count in recorded.items():
        if found.get(kind, 0) > count:
            yield (
                f"{kind}: {found[kind]} odd sentences, at most {count} are allowed; rewrite the new ones, which "
                "`python -m tests.support.plain_words --list` shows"
            )
        elif found.get(kind, 0) < count - SLACK:
            yield f"{kind}: only {found.get(kind, 0)} odd sentences are left; write this number into RECORDED"


def main(arguments: list[str]) -> int:
    places = [(place, one) for place in everything() for one in odd(place.text)]
    if arguments == ["--list"]:
        for place, one in places:
            print(f"{place.kind}  {place.path}:{place.line}: {one}")
        return 0
    wrong = list(complaints(Counter(place.kind for place, _ in places), RECORDED))
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
