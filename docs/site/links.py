"""Makes links that leave docs/ work on the site as they do in the repository: each target becomes a page.

    docs/operations.md ── ../infra/README.md ──► repository/infra/README.md        a page; its links are followed, too
                       ── ../holdfast/config.py ──► repository/holdfast/config.py.md    the file, as a code block
                       ── ../examples ──► repository/examples/index.md                  a list of the folder's files

A hook of mkdocs.yml. No page exists only for the site, and no link leads to another host.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).resolve().parents[2]
_PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "infra/kubernetes/README.md",
    "infra/skypilot/README.md",
)  # the pages that the navigation names
_ELSEWHERE = "repository"  # the site's folder for files outside docs/
_LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the targets of the pages' links, and of the links in those targets."""
    pending = [file.src_uri for file in files.documentation_pages()]
    pending += [_add(name, files, config) for name in _PAGES]
    while pending:
        page = _in_repository(pending.pop())
        if not page.endswith(".md") or not (_ROOT / page).is_file():
            continue
        for target in _LINK.findall((_ROOT / page).read_text(encoding="utf-8")):
            found = _led_to(page, target)
            if (_ROOT / found).exists() and _on_site(found) not in files.src_uris:
                pending.append(_add(found, files, config))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Return the page with its links rewritten for the site."""
    here = page.file.src_uri
    source = _in_repository(here)

    def link(match: re.Match[str]) -> str:
        found = _on_site(_led_to(source, match[1]))
        return posixpath.relpath(found, posixpath.dirname(here)) if found in files.src_uris else match[1]

    return _LINK.sub(link, markdown)


def _led_to(page: str, target: str) -> str:
    """Return a link target's path in the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def _on_site(path: str) -> str:
    """Return the place on the site of a path in the repository."""
    inside = PurePosixPath(path).is_relative_to("docs")
    place = posixpath.relpath(path, "docs") if inside else f"{_ELSEWHERE}/{path}"
    if (_ROOT / path).is_dir():
        return f"{place}/index.md"
    return place if inside or path.endswith(".md") else f"{place}.md"


def _in_repository(place: str) -> str:
    """Invert `_on_site` for pages that are Markdown in the repository, too."""
    return place.removeprefix(f"{_ELSEWHERE}/") if place.startswith(f"{_ELSEWHERE}/") else f"docs/{place}"


def _add(path: str, files: Files, config: MkDocsConfig) -> str:
    place = _on_site(path)
    files.append(File.generated(config, place, content=_page(_ROOT / path, path)))
    return place


def _page(file: Path, name: str) -> str:
    if file.is_dir():
        names = sorted(entry.name for entry in os.scandir(file) if entry.name[0] not in "._")
        return "\n".join([f"# {name}/\n", *(_entry(file / entry) for entry in names), ""])
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return text
    language = {".py": "python", ".json": "json", ".yml": "yaml"}.get(file.suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n````{language}\n{text.rstrip()}\n````\n"


def _entry(path: Path) -> str:
    """Return a line of a folder's page."""
    if path.suffix != ".md":
        return f"- `{path.name}{'/' * path.is_dir()}`"
    title, _, _ = path.read_text(encoding="utf-8").partition("\n")
    return f"- [{title.lstrip('# ')}]({path.name})"
