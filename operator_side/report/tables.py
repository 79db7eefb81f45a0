"""A table of the page: a caption, named columns, and numbers to the right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from operator_side.report.markup import Html, tag

__all__ = ["table"]

_MANY_COLUMNS = 6  # do not fit on a small screen: these tables are moved sideways instead of squeezed


def table(
    caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Iterable[str] = ()
) -> Html:
    """The first cell of each row names it.

    Args:
        caption: What it shows.
        columns: Their names.
        rows: Cells; texts or `Html`.
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
