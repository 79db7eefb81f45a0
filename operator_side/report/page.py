"""The page: head, sentences, sections, and what is not known. One file; it loads nothing and runs nothing.

The policy in its head lets a browser use only the one style sheet inside it: whatever else a text might bring is dead.
"""

from __future__ import annotations

import base64
import hashlib

from holdfast.telemetry.event_text import cut
from operator_side.report.facts import RunFacts
from operator_side.report.markup import Html, moment, plural, tag
from operator_side.report.sections import SECTIONS
from operator_side.report.sentences import look_at, what_happened
from operator_side.report.style import STYLE

_URL_CHARACTERS_MAX = 300
_FILES_SHOWN = 20


def page(facts: RunFacts, *, made_at_unix: float, version: str) -> bytes:
    """Make the whole file.

    Args:
        facts: Facts to show.
        made_at_unix: Time that the page names as its own.
        version: Version of holdfast.
    """
    run = cut(facts.run, _URL_CHARACTERS_MAX)
    found = [
        (name, title, made) for name, (title, make) in SECTIONS.items() if (made := make(facts)) is not None
    ]
    links = [(name, title) for name, title, _ in found] + [("unknown", "Not known")]
    body = tag(
        "main",
        tag("h1", f"Events of {run}"),
        tag(
            "p", f"Made {moment(made_at_unix)} by holdfast {version} from {_sources(facts)}.", class_="faint"
        ),
        tag("div", *(tag("p", text) for text in what_happened(facts)), class_="summary"),
        _look(facts, {name for name, _ in links}),
        tag(
            "nav",
            tag("ul", *(tag("li", tag("a", title, href=f"#{name}")) for name, title in links)),
            aria_label="Sections",
        ),
        *(made for _, _, made in found),
        _unknown(facts),
    )
    document = tag("html", _head(run), tag("body", body), lang="en")
    return b"<!DOCTYPE html>\n" + document.encode() + b"\n"


def _head(run: str) -> Html:
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),  # or a browser asks for one
        tag("title", f"{run}: what happened"),
        tag("style", Html(STYLE)),
    )


def _sources(facts: RunFacts) -> str:
    in_store = sum(row.in_store for row in facts.rows)
    files = facts.log.files
    names = ", ".join(files[:_FILES_SHOWN]) + (
        f" and {len(files) - _FILES_SHOWN} more" if len(files) > _FILES_SHOWN else ""
    )
    logs = f" and {plural(len(facts.log.events), 'event')} of {names}" if files else ""
    return f"{plural(in_store, 'manifest')}{logs}"


def _look(facts: RunFacts, there: set[str]) -> Html:
    found = look_at(facts)
    if not found:
        inside = tag("p", "Nothing stands out.")
    else:
        items = [
            tag(
                "li",
                one.text,
                " ",
                tag("a", "show", href=f"#{one.section}") if one.section in there else None,
            )
            for one in found
        ]
        inside = tag("ol", *items)
    return tag("div", tag("h2", "Points to check", id="look"), inside, class_="look")


def _unknown(facts: RunFacts) -> Html:
    known = "docs/report.md says how each figure is computed."
    return tag(
        "section",
        tag("h2", "Unknown", id="unknown"),
        tag("ul", *(tag("li", text) for text in facts.unknown)),
        tag("p", known, class_="faint"),
        aria_labelledby="unknown",
    )
