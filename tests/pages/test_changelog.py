"""Fragments of changelog.d/ are one sentence each, and a release merges them into CHANGELOG.md."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.pages.test_documents import ROOT

SCRIPT = "docs/site/changelog.py"


def run(root: Path, *arguments: str) -> str:
    command = [sys.executable, str(root / SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_fragments_are_one_sentence_in_a_known_category() -> None:
    fragments = sorted((ROOT / "changelog.d").iterdir())
    wrong = [
        path.name
        for path in fragments
        if not re.fullmatch(r"(breaking|added|changed|fixed)-[a-z0-9-]+\.md", path.name)
        or not re.fullmatch(r"[^\n]+\.\n", path.read_text(encoding="utf-8"))
        or re.search(r"\.\s[A-Z]", path.read_text(encoding="utf-8"))
    ]
    assert wrong == []


def test_unreleased_changes_are_printed_by_category() -> None:
    printed = run(ROOT)
    assert printed.startswith("## Unreleased\n\n### ")
    assert printed.count("\n- ") == len(list((ROOT / "changelog.d").glob("*.md")))


def test_release_moves_fragments_into_the_changelog(tmp_path: Path) -> None:
    (tmp_path / "docs/site").mkdir(parents=True)
    (tmp_path / "changelog.d").mkdir()
    shutil.copy(ROOT / SCRIPT, tmp_path / SCRIPT)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\nHead.\n\n## 1.0.0, 2026-01-01\n\n- Old.\n")
    (tmp_path / "changelog.d/fixed-drill.md").write_text("A drill ends.\n")
    (tmp_path / "changelog.d/added-rank.md").write_text("A new command.\n")
    run(tmp_path, "1.1.0")
    assert re.fullmatch(
        r"# Changelog\n\nHead\.\n\n## 1\.1\.0, [\d-]+\n\n### Added\n\n- A new command\.\n\n"
        r"### Fixed\n\n- A drill ends\.\n\n## 1\.0\.0, 2026-01-01\n\n- Old\.\n",
        (tmp_path / "CHANGELOG.md").read_text(),
    )
    assert list((tmp_path / "changelog.d").iterdir()) == []
