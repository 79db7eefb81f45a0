"""HTML by construction: a text is escaped wherever it goes, and only what `tag` has made is not.

tag("p", "1 < 2", class_="note") ─► Html('<p class="note">1 &lt; 2</p>')
"""

from __future__ import annotations

import html

from holdfast.command.output import plain

__all__ = ["Html", "join", "tag"]

_VOID = frozenset({"meta", "link", "br"})


class Html(str):
    """Markup. Only this module makes it of anything that is not."""

    __slots__ = ()


def tag(name: str, /, *children: str | None, **attributes: str | float | None) -> Html:
    """One element. Children that are not `Html` are texts, None is left out; of attributes, too.

    Args:
        name: Of the element.
        children: In their order.
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
    """One after the other."""
    return Html(
        "".join(
            child if isinstance(child, Html) else _escaped(child) for child in children if child is not None
        )
    )


def _value(value: str | float) -> str:
    """Places in a picture need no more than a tenth of a pixel."""
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")


def _escaped(text: str) -> str:
    return html.escape(plain(text), quote=True)
