"""The variables of the user's environment that a run of a drill keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from operator_side.drill.job import DrillRun, Setup
from operator_side.drill.kill_plan import Kill


class PrintedEnvironment(DrillRun):
    """A run whose only process prints its environment."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Setup(["train.py"], 1, ()), folder)
        self._process = self._start(["env"], self._env)

    @property
    def exit_code(self) -> int | None:
        return self._process.wait(60)

    def strike(self, kill: Kill) -> bool:
        raise AssertionError(kill)

    def _end(self) -> None:
        self._process.wait(60)


def test_a_drill_keeps_settings_but_neither_the_own_run_nor_the_people_who_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ("STORE", "EVENTS", "TIERS", "STAGER", "NOTIFY")
    for name in (*own, "CHUNK_BYTES"):
        monkeypatch.setenv(f"HOLDFAST_{name}", "of-the-user")
    with PrintedEnvironment(tmp_path) as run:
        assert run.exit_code == 0
    printed = (tmp_path / "output.log").read_text().splitlines()
    assert "HOLDFAST_CHUNK_BYTES=of-the-user" in printed
    assert [line for line in printed if line.endswith("=of-the-user")] == ["HOLDFAST_CHUNK_BYTES=of-the-user"]
    assert f"HOLDFAST_EVENTS={tmp_path / 'logs' / 'events.jsonl'}" in printed
