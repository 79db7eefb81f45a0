"""Merges the fragments of changelog.d/: `python docs/site/changelog.py [VERSION]`.

Without VERSION, prints the section. With VERSION, moves it into CHANGELOG.md and removes the fragments.
"""

from __future__ import annotations

import datetime as dt
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_CATEGORIES = ("breaking", "added", "changed", "fixed")


def section(fragments: list[Path], title: str) -> str:
    """Return the section of a release; raises KeyError for a fragment of an unknown category."""
    lines: dict[str, list[str]] = {category: [] for category in _CATEGORIES}
    for path in fragments:
        sentence = " ".join(path.read_text(encoding="utf-8").split())
        lines[path.name.partition("-")[0]].append(f"- {sentence}\n")
    parts = [f"### {category.title()}\n\n{''.join(found)}" for category, found in lines.items() if found]
    return "\n".join([f"## {title}\n", *parts])


def main(arguments: list[str]) -> None:
    fragments = sorted((_ROOT / "changelog.d").glob("*.md"))
    if not arguments:
        sys.stdout.write(section(fragments, "Unreleased"))
        return
    page = _ROOT / "CHANGELOG.md"
    head, newest, older = page.read_text(encoding="utf-8").partition("\n## ")
    released = section(fragments, f"{arguments[0]}, {dt.datetime.now(dt.UTC).date()}")
    page.write_text(f"{head}\n{released}{newest}{older}", encoding="utf-8")
    for path in fragments:
        path.unlink()


if __name__ == "__main__":
    main(sys.argv[1:])
