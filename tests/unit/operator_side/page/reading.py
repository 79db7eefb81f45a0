"""Parses a page as a browser would."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser


class Page(HTMLParser):
    """A parsed page and its parts; requires that elements are closed in order."""

    VOID = frozenset({"meta", "link", "br"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.declaration = ""
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_decl(self, decl: str) -> None:
        self.declaration = decl

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> says twice: {names}"
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in {"style", "script"}:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def of(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == name]


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def policy_of(text: str) -> dict[str, str]:
    """Return the content security policy by directive."""
    said = next(
        one["content"] for one in Page(text).of("meta") if one.get("http-equiv") == "Content-Security-Policy"
    )
    return dict(part.strip().split(" ", 1) for part in (said or "").split(";"))


def style_of(text: str) -> str:
    found = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert found is not None
    return found[1]


def tiles_of(text: str) -> dict[str, str]:
    """Return each tile's title and figure."""
    return dict(re.findall(r'<dt>([^<]*)</dt><dd class="figure">([^<]*)</dd>', text))


def _luminance(colour: str) -> float:
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours as WCAG defines it, from 1 to 21."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def loads_nothing(text: str, links: tuple[str, ...] = ("#", "data:")) -> None:
    """Check that a page loads nothing from any host, and runs only its own two scripts."""
    found = Page(text)
    assert found.declaration == "DOCTYPE html"
    active = {
        "img",
        "iframe",
        "object",
        "embed",
        "form",
        "base",
        "image",
        "use",
        "foreignObject",
        "video",
        "audio",
    }
    assert not {name for name, _ in found.tags} & active
    for name, attributes in found.tags:
        assert not {"src", "srcset", "action", "style", "background", "xlink:href"} & attributes.keys(), name
        assert not any(key.startswith("on") for key in attributes)
        if "href" in attributes:
            assert (attributes["href"] or "").startswith(links), attributes
    assert not re.search(r"url\(|@import|@font-face", style_of(text))
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == text.count("<script") == 2
    assert "sourceMappingURL" not in text
    policy = policy_of(text)
    assert policy["default-src"] == "'none'"
    assert policy["style-src"] == digest(style_of(text))
    assert policy["script-src"].split() == [digest(script) for script in scripts]
