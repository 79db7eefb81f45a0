"""The variables of the user's environment that a drill's run keeps."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from operator_side.drill.drill_run import DrillRun, DrillSetup


class PrintedEnvironment(DrillRun):
    """A drill's run whose only process prints its environment."""

    def _start_run(self) -> subprocess.Popen[bytes]:
        return self._start(["env"], self._env)


def test_a_drill_keeps_settings_but_neither_the_own_run_nor_the_people_who_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ("STORE", "EVENTS", "TIERS", "STAGER", "NOTIFY")
    for name in (*own, "CHUNK_BYTES"):
        monkeypatch.setenv(f"HOLDFAST_{name}", "of-the-user")
    with PrintedEnvironment(DrillSetup(["train.py"], 1, ()), tmp_path, kills=0) as run:
        assert run._process.wait(60) == 0
    printed = (tmp_path / "output.log").read_text().splitlines()
    assert "HOLDFAST_CHUNK_BYTES=of-the-user" in printed
    assert [line for line in printed if line.endswith("=of-the-user")] == ["HOLDFAST_CHUNK_BYTES=of-the-user"]
    assert f"HOLDFAST_EVENTS={tmp_path / 'logs' / 'events.jsonl'}" in printed
