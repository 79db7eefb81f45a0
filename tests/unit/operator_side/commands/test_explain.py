"""`holdfast explain` shows the page's own text, in a checkout and from a wheel without docs/."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from holdfast.errors import BusyError, HoldfastError, PeerLost, StateError
from operator_side.commands.explain import explain, section

ROOT = Path(__file__).resolve().parents[4]
PAGE = "docs/troubleshooting.md"


def explained(*arguments: str) -> str:
    done = CliRunner().invoke(explain, arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_code_gives_its_section_of_the_page_and_no_other() -> None:
    text = explained("store")
    assert text.startswith("## store\n")
    assert text in (ROOT / PAGE).read_text()
    assert text.count("\n## ") == 0
    assert "`no room (…)" in text
    assert explained("run").startswith("## run\n")


def test_without_a_code_all_are_listed_with_their_exit_codes() -> None:
    rows = {line.split()[0]: line for line in explained().splitlines()[2:]}
    assert list(rows)[:3] == ["config", "state", "store"]
    assert " 9 " in rows["peer_lost"]
    assert "run" in rows
    documents = json.loads(explained("--json"))
    assert [(one["code"], one["exit_code"]) for one in documents][-2:] == [
        ("resume_differs", 12),
        ("run", None),
    ]
    assert all(f"\n{code} " in f"\n{explained()}" for code in (one["code"] for one in documents))


@pytest.mark.parametrize("kind", [StateError, PeerLost, BusyError])
def test_an_exit_code_is_explained_as_its_code(kind: type[HoldfastError]) -> None:
    assert explained(str(kind.exit_code)) == explained(kind.code)


def test_json_has_the_text() -> None:
    found = json.loads(explained("busy", "--json"))
    assert found == {"code": "busy", "exit_code": 10, "text": section("busy")}


def test_an_unknown_code_is_a_usage_error_that_lists_the_codes() -> None:
    done = CliRunner().invoke(explain, ["E0308"])
    assert done.exit_code == 2
    assert "peer_lost" in done.output


@pytest.fixture(name="built", scope="module")
def _built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel as the image does, from the files that Dockerfile.dockerignore admits; return its content."""
    tree = tmp_path_factory.mktemp("tree")
    allowed = (ROOT / "infra/docker/Dockerfile.dockerignore").read_text().splitlines()
    for name in [line[1:] for line in allowed if line.startswith("!")]:
        source, target = ROOT / name, tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    build = "from setuptools import setup; setup(script_args=['-q', 'build', '--build-lib', 'built'])"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=tree, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return tree / "built"


def test_a_wheel_has_the_page_itself_and_explains_from_it(built: Path) -> None:
    page = built / "holdfast" / "troubleshooting.md"
    assert not page.is_symlink()
    assert page.read_text() == (ROOT / PAGE).read_text()
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(built), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "explain", "damage"],
        cwd=built,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, section("damage") + "\n"), done.stderr
