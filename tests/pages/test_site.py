"""The documentation builds as a site without warnings, loads nothing from other hosts, and has no broken links."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from tests.support.job import REPOSITORY
from tests.unit.operator_side.page.reading import contrast

_SECONDS_MAX = 120.0
_LOADED = {"src", "srcset", "data", "poster"}  # attributes whose target a browser fetches by itself
_IN_STYLE = re.compile(r"(?:url\(|@import)\s*[\"']?\s*((?:https?:)?//[^\"')\s]+)")


class Seen(NamedTuple):
    """Contents of a page of the site."""

    links: set[str]
    loaded: set[str]
    names: set[str]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen = Seen(set(), set(), set())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name == "id":
                self.seen.names.add(value)
            elif name in _LOADED or (tag, name) == ("link", "href"):
                self.seen.loaded.add(value)
            elif name == "style":
                self.seen.loaded.update(_IN_STYLE.findall(value))
            elif (tag, name) == ("a", "href"):
                self.seen.links.add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=REPOSITORY,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=_SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def seen(site: Path) -> dict[str, Seen]:
    """Return each page by its path, except the 404 page, which may appear at any address."""
    found = {}
    for path in site.rglob("*.html"):
        if path.name == "404.html":
            continue
        reader = _Reader()
        reader.feed(path.read_text(encoding="utf-8"))
        found[str(path.relative_to(site))] = reader.seen
    return found


def test_the_site_loads_nothing_from_another_host(site: Path, seen: dict[str, Seen]) -> None:
    away = {
        f"{page}: {url}"
        for page, found in seen.items()
        for url in found.loaded
        if urlsplit(url).netloc or url.startswith("//")
    }
    for sheet in site.rglob("*.css"):
        away |= {f"{sheet.name}: {url}" for url in _IN_STYLE.findall(sheet.read_text(encoding="utf-8"))}
    assert not away
    assert any(found.loaded for found in seen.values())
    assert (site / "search" / "search_index.json").exists(), "the search is made with the site"


def test_no_page_has_what_makes_the_scripts_of_the_theme_ask_another_host(site: Path) -> None:
    """The theme's scripts fetch mermaid for pages that use it, and count stars if the navigation has a repository."""
    scripts = "".join(path.read_text(encoding="utf-8") for path in (site / "assets/javascripts").glob("*.js"))
    named = set(re.findall(r"[\"'`]https://([\w.-]+)/", scripts))
    assert "unpkg.com" in named, "the pattern finds too little"
    assert named <= {"unpkg.com", "api.github.com", "gitlab.com"}, "another one: what makes a page ask it?"
    drawn = re.compile(r"""class="[^"]*\bmermaid\b|data-md-component="source\"""")
    asking = [path for path in site.rglob("*.html") if drawn.search(path.read_text(encoding="utf-8"))]
    assert not asking


def test_links_and_header_of_light_pages_have_enough_contrast(site: Path) -> None:
    style = (site / "stylesheets/holdfast.css").read_text(encoding="utf-8")
    colours = dict(re.findall(r"(--md-typeset-a-color|--md-primary-fg-color): (#\w{6})", style))
    assert len(colours) == 2
    assert {name: colour for name, colour in colours.items() if contrast(colour, "#ffffff") < 4.5} == {}


def test_the_interface_is_there_with_what_its_docstrings_say(site: Path, seen: dict[str, Seen]) -> None:
    assert "trainer_side.Checkpointer.restore" in seen["api/trainer_side/index.html"].names
    page = (site / "api/trainer_side/index.html").read_text(encoding="utf-8")
    assert "Restore the state from the newest good checkpoint" in page
