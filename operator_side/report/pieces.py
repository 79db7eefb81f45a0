"""What the sections of the page have in common: their frame, keys of colours, and the words for what was left out."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.telemetry.told import cut
from operator_side.report.checkpoints import Checkpoint
from operator_side.report.markup import Html, tag
from operator_side.report.words import plural

__all__ = ["ROWS_MAX", "keys", "said", "section", "stands_out", "thin"]

ROWS_MAX = 200  # of a table
_TEXT_CHARACTERS_MAX = 300


def section(name: str, title: str, *children: str | None) -> Html:
    """A section; `name` is its place in the page."""
    return tag("section", tag("h2", title, id=name), *children, aria_labelledby=name)


def said(text: str) -> str:
    """What a file says, not all of it if it is long."""
    return cut(text, _TEXT_CHARACTERS_MAX)


def thin(shown: Sequence[object], all_of_them: Sequence[object], what: str, kept: str) -> Html | None:
    """That not all are shown, and which are; None if all are."""
    if len(shown) == len(all_of_them):
        return None
    return tag("p", f"{len(shown):,} of {plural(len(all_of_them), what)} are shown: {kept}.", class_="faint")


def keys(*names: tuple[str, str]) -> Html:
    """What the colours of a picture mean: (class, words)."""
    return tag(
        "p",
        *(tag("span", tag("span", "", class_=f"key {kind}"), name) for kind, name in names),
        class_="keys",
    )


def stands_out(row: Checkpoint) -> bool:
    """Whether it is to be shown rather than one that went well."""
    return row.state in {"bad", "failed", "staged", "saving"}
