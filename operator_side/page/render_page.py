"""Renders a page as one file that includes its style and scripts, and loads nothing else.

Values come from logs, manifests and sockets: Jinja escapes each of them, `_printable` its control characters.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from holdfast import __version__
from holdfast.command.output import escape_controls, format_size
from holdfast.telemetry.event_text import truncate
from operator_side.page import words

_CELL_CHARACTERS_MAX = 300
_MAP = b"//# sourceMappingURL="  # otherwise a browser would request that file


def render_page(template: str, **values: Any) -> bytes:
    """Render a template of a package in `operator_side`, such as `report/report.html`."""
    return _environment().get_template(template).render(version=__version__, **values).encode()


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("operator_side", ""),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for one in (words.moment, words.brief, words.dollars, words.rate, format_size):
        environment.filters[one.__name__] = one
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    style, scripts = _file("page.css"), [_file("vendor/chart.umd.min.js"), _file("page.js")]
    environment.filters |= {"cell": _cell, "code": _code}
    environment.globals |= {
        "share": words.share,
        "plural": words.plural,
        "style": style,
        "scripts": scripts,
        "policy": functools.partial(_policy, style, scripts),
        "every": None,
    }
    return environment


def _file(name: str) -> Markup:
    data = resources.files(__package__).joinpath(name).read_bytes()
    return Markup(data.partition(_MAP)[0].decode())  # noqa: S704 - our own file


def _printable(value: object) -> object:
    return value if isinstance(value, Markup) else "-" if value is None else escape_controls(str(value))


def _code(text: str) -> Markup:
    """Mark up a text whose `commands` are in backticks."""
    parts = escape_controls(text).split("`")
    if not len(parts) % 2:
        parts = [escape_controls(text)]
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if at % 2 else part for at, part in enumerate(parts)
    )


def _cell(value: object) -> object:
    return truncate(value, _CELL_CHARACTERS_MAX) if isinstance(value, str) else value


def _policy(style: str, scripts: Sequence[str], every: float | None) -> Markup:
    """Return the content policy: only this style and these scripts, by digest; a live page may fetch from its host."""
    ours = " ".join(map(_digest, scripts))
    connect = "'self'" if every else "'none'"
    return Markup(  # noqa: S704 - of digests
        f"default-src 'none'; style-src {_digest(style)}; script-src {ours}; connect-src {connect}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
