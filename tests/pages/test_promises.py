"""Each promise of docs/reliability.md names a test that `make check` runs, or another make target."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.chaos.cells import CELLS
from tests.support.job import REPOSITORY

_PAGE = REPOSITORY / "docs" / "reliability.md"
_MATRIX = "tests/chaos/regular/test_matrix.py"


class Promise(NamedTuple):
    """A row of the table: the promise, its tests, and the targets other than `make check`."""

    what: str
    tests: tuple[str, ...]
    targets: frozenset[str]


def selected() -> list[str]:
    """Return the arguments that `make check` passes to pytest."""
    line = "print: ; @echo $(TEST_FOLDERS) $(REST_FOLDERS) $(MORE_FOLDERS)"
    done = subprocess.run(
        ["make", "--no-print-directory", f"--eval={line}", "print"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def promises(page: str) -> Iterator[Promise]:
    """Yield the rows of the table under "Failures and promised results"."""
    table = page.partition("## Failures")[2].partition("\n## ")[0]
    for line in table.splitlines():
        if not line.startswith("| ") or line.startswith("| failure |"):
            continue
        what, _, shown = (cell.strip() for cell in line.strip("| ").split(" | "))
        tests = re.findall(r"`((?:tests/|test_)[\w./]+)`", shown)
        if "kill matrix" in shown.lower():
            tests.append(_MATRIX)
        yield Promise(what, tuple(tests), frozenset(re.findall(r"`make (\w+)", shown)))


def is_in(name: str, folders: list[str]) -> bool:
    return any(Path(name).is_relative_to(folder) for folder in folders)


def complaints(page: str, folders: list[str]) -> list[str]:
    """List the promises that `make check` does not test."""
    wrong = []
    for promise in promises(page):
        elsewhere = [name for name in promise.tests if not is_in(name, folders)]
        wrong += [
            f"{promise.what}: {name} is not there"
            for name in promise.tests
            if not (REPOSITORY / name).exists()
        ]
        wrong += [
            f"{promise.what}: {name} is not in `make check`, and its own target is not named"
            for name in elsewhere
            if not promise.targets & set(Path(name).parts)
        ]
        if len(elsewhere) == len(promise.tests):
            wrong.append(f"{promise.what}: no test in `make check`")
    return wrong


def test_a_test_in_make_check_stands_behind_each_promise() -> None:
    page = _PAGE.read_text(encoding="utf-8")
    assert len(list(promises(page))) > 25
    assert complaints(page, selected()) == []


def test_the_cells_of_the_kill_matrix_that_make_check_runs_have_all_victims_that_the_page_names() -> None:
    rows = [line for line in _PAGE.read_text(encoding="utf-8").splitlines() if "kill matrix" in line.lower()]
    shown = [part for row in rows for part in row.lower().split("kill matrix")[1:]]
    named = {name for part in shown for name in re.findall(r"\*([a-z ]+)\*", part)}
    assert len(named) > 5
    assert named <= {name for cell in CELLS if cell.regular for name in (cell.victims.name, cell.stage.name)}
