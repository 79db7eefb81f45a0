"""HTML by construction: a text is escaped wherever it goes, and only what `tag` has made is not.

tag("p", "1 < 2", class_="note") ─► Html('<p class="note">1 &lt; 2</p>')
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from holdfast.command.output import plain, seconds, size
from holdfast.telemetry.event_text import cut
from holdfast.telemetry.rows import CheckpointRow

_VOID = frozenset({"meta", "link", "br"})


class Html(str):
    """Markup, made by this module alone: every other text is escaped."""

    __slots__ = ()


def tag(name: str, /, *children: str | None, **attributes: str | float | None) -> Html:
    """Make one element. Children that are not `Html` are escaped; None is left out, also among attributes.

    Args:
        name: Name of the element.
        children: Elements and texts, in their order.
        attributes: `class_` is `class`, and `_` inside a name is `-`.
    """
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(_value(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{said}>")
    return Html(f"<{name}{said}>{join(*children)}</{name}>")


def join(*children: str | None) -> Html:
    return Html(
        "".join(
            child if isinstance(child, Html) else _escaped(child) for child in children if child is not None
        )
    )


def _value(value: str | float) -> str:
    """A number in a picture, to a tenth of a pixel."""
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")


def _escaped(text: str) -> str:
    return html.escape(plain(text), quote=True)


def moment(at_unix: float | None) -> str:
    """`2026-11-22 03:02:11 UTC`; `-` where it is not known."""
    return "-" if at_unix is None else datetime.fromtimestamp(at_unix, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def clock(at_unix: float, *, day: bool = False) -> str:
    """`03:02:11`, or with its day `11-22 03:02`."""
    return datetime.fromtimestamp(at_unix, UTC).strftime("%m-%d %H:%M" if day else "%H:%M:%S")


def brief(value: float | None) -> str:
    """Seconds in the unit that fits: `36.0 ms`, `3.40 s`, `4 min`; `-` where they are not known."""
    if value is None:
        return "-"
    return f"{1000 * value:.1f} ms" if 0 < value < 0.1 else seconds(value)


def share(part: float, whole: float) -> str:
    """`86 %`, `0.3 %`."""
    percent = 100 * part / whole if whole > 0 else 0.0
    return f"{percent:.0f} %" if percent >= 10 or percent == 0 else f"{percent:.1f} %"


def dollars(value: float | None) -> str:
    """`$12.40`; `-` without a price."""
    return "-" if value is None else f"${value:,.2f}"


def rate(nbytes: float | None) -> str:
    """Bytes in a second: `1.4 GiB/s`."""
    return "-" if nbytes is None else f"{size(int(nbytes))}/s"


def plural(count: int, one: str, many: str = "") -> str:
    """`1 checkpoint`, `2 checkpoints`."""
    return f"{count:,} {one}" if count == 1 else f"{count:,} {many or one + 's'}"


ROWS_MAX = 200  # of a table
_TEXT_CHARACTERS_MAX = 300


def section(name: str, title: str, *children: str | None) -> Html:
    """A section; `name` is its anchor in the page."""
    return tag("section", tag("h2", title, id=name), *children, aria_labelledby=name)


def said(text: str) -> str:
    """A text from a file, cut if it is long."""
    return cut(text, _TEXT_CHARACTERS_MAX)


def thin(shown: Sequence[object], all_of_them: Sequence[object], what: str, kept: str) -> Html | None:
    """A line on how many of the items are shown, and which; None if all are."""
    if len(shown) == len(all_of_them):
        return None
    return tag("p", f"{len(shown):,} of {plural(len(all_of_them), what)} are shown: {kept}.", class_="faint")


def keys(*names: tuple[str, str]) -> Html:
    """The meaning of a picture's colours, from pairs of class and words."""
    return tag(
        "p",
        *(tag("span", tag("span", "", class_=f"key {kind}"), name) for kind, name in names),
        class_="keys",
    )


def stands_out(row: CheckpointRow) -> bool:
    """Whether the checkpoint is to be shown rather than one without trouble."""
    return row.state in {"bad", "drifted", "doubtful", "failed", "staged", "saving"} or bool(row.nonfinite)


_MANY_COLUMNS = 6  # do not fit on a small screen: these tables are moved sideways instead of squeezed


def table(
    caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Iterable[str] = ()
) -> Html:
    """Make a table. The first cell of each row is its heading.

    Args:
        caption: Title of the table.
        columns: Names of the columns.
        rows: Texts or `Html` for each row.
        numbers: Names of the columns that hold numbers.
    """
    right = ["number" if name in set(numbers) else None for name in columns]
    head = tag(
        "tr", *(tag("th", name, scope="col", class_=kind) for name, kind in zip(columns, right, strict=True))
    )
    body = [
        tag(
            "tr",
            *(
                tag("th", cell, scope="row", class_=kind) if index == 0 else tag("td", cell, class_=kind)
                for index, (cell, kind) in enumerate(zip(row, right, strict=True))
            ),
        )
        for row in rows
    ]
    found = tag(
        "table",
        tag("caption", caption),
        tag("thead", head),
        tag("tbody", *body),
        class_="many" if len(right) >= _MANY_COLUMNS else None,
    )
    return tag("div", found, class_="wide", role="region", aria_label=caption, tabindex="0")
