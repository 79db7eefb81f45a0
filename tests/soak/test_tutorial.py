"""Nightly, docs/tutorial.md, typed line by line into one shell: a real job is killed and resumes, and a drill runs.

tests/pages/test_doc_commands.py checks the commands of all pages by their parsers.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from holdfast.checkpoints.catalog import Catalog
from holdfast.store import open_store
from tests.support.doc_commands import ELSEWHERE, Shown, shown
from tests.support.job import NOT_LAUNCHED, REPOSITORY, environment

pytestmark = [pytest.mark.mpi]

STEPS, EVERY = 300, 20
LAUNCHES_MAX = 3
SECONDS_MAX = 280.0
# These change the environment of the tests, or run until they are told to stop.
NOT_TYPED = (". .venv/bin/activate", "make ", "pip install", *(f"{program} " for program in ELSEWHERE))


class Session(NamedTuple):
    """The result of a session: the exit code of each typed line, by its line number in the page; and all output."""

    codes: dict[int, int]
    said: str


def typed(lines: Sequence[Shown], folder: Path) -> Session:
    """Type the lines in `folder`, as in a checkout. All processes end with the call."""
    (folder / "examples").symlink_to(REPOSITORY / "examples")
    runtime, codes, said = folder / "runtime", folder / "codes", folder / "said"
    env = environment(runtime, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    script = "\n".join(f"{line.text}\necho {line.number} $? >> {codes}" for line in lines)
    with said.open("wb") as output:
        shell = subprocess.Popen(
            ["bash", "-c", script],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + SECONDS_MAX
        while shell.poll() is None and time.monotonic() < deadline and not _was_not_launched(folder):
            time.sleep(0.2)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
        _end(runtime)
    pairs = [line.split() for line in codes.read_text().splitlines()] if codes.exists() else []
    text = "".join(path.read_text(errors="replace") for path in (said, *folder.glob("*.log")))
    return Session({int(number): int(code) for number, code in pairs}, text)


def _was_not_launched(folder: Path) -> bool:
    return any(
        NOT_LAUNCHED in path.read_text(errors="replace") for path in (folder / "said", *folder.glob("*.log"))
    )


def _end(runtime: Path) -> None:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOLDFAST_RUNTIME_DIR") == str(runtime):
                process.kill()


@pytest.mark.skipif(shutil.which("pkill") is None, reason="no pkill on this machine")
def test_every_line_of_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    lines = [line for line in shown("docs/tutorial.md") if not line.text.startswith(NOT_TYPED)]
    for launch in range(LAUNCHES_MAX):
        folder = tmp_path / f"checkout-{launch}"
        folder.mkdir()
        session = typed(lines, folder)
        if not _was_not_launched(folder):
            break
    wrong = [str(line) for line in lines if session.codes.get(line.number) != 0]
    assert not wrong, session.said

    newest = Catalog(open_store(str(folder / "run"))).list()[0].manifest
    assert newest is not None
    assert (newest.step, newest.attempt) == (STEPS - 1, 2), "the second job ended the training"
    said = (folder / "said").read_text()
    killed_at, *steps = [int(step) for step in re.findall(r"^step +(\d+)  loss", said, re.MULTILINE)]
    assert killed_at < STEPS - 1, "what `grep loss first.log` has shown"
    assert steps[0] > EVERY, "the second job went on behind a checkpoint"
    assert steps == sorted(steps)
    assert "passed: the run resumed bit for bit" in session.said
