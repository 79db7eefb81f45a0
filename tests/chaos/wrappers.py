"""A rank's wrapper gets SIGKILL, as when a container or a pod is killed: `holdfast run` reports a lost rank, not a bug.

    mpirun ── holdfast run's own process ── the rank              SIGKILL: no process can report the rank's end
    mpirun ── holdfast run's own process ── sh -c ── the rank     SIGKILL to the shell: the rank itself lives on

`holdfast drill --with wrapper` kills, and compares the resumed run with an undisturbed one, bit for bit.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from holdfast.telemetry.event_reading import read_logs
from operator_side.report.attempts import gather_attempts
from tests.integration.jobs import drilled
from tests.support.cluster import SMALL
from tests.support.events import read_events
from tests.support.job import environment

__all__ = ["WRAPPER_CELLS", "WrapperCell", "play_wrapper"]

STEPS, EVERY, SEED = 60, 10, 3
_SECONDS_MAX = 280.0


class WrapperCell(NamedTuple):
    """One run. `wrapper`: name of the process that dies. `shell`: whether a shell starts the rank."""

    wrapper: str
    shell: bool

    @property
    def name(self) -> str:
        """In test ids and results."""
        return f"{self.wrapper} x SIGKILL"


WRAPPER_CELLS = (
    WrapperCell("the wrapper of `holdfast run`", shell=False),
    WrapperCell("`sh -c`", shell=True),
)


def play_wrapper(cell: WrapperCell, directory: Path) -> None:
    """Play one cell."""
    script = [sys.executable, drilled.__file__, str(STEPS), str(EVERY)]
    command = ["sh", "-c", f"{shlex.join(script)}; exit $?"] if cell.shell else script
    settings = [
        f"--set={name.removeprefix('--')}={value}"
        for name, value in zip(SMALL[::2], SMALL[1::2], strict=True)
    ]
    folder, env = directory / "drill", environment(directory / "runtime")
    done = _holdfast(
        *("drill", "-n", "2", "--json", "--dir", str(folder), "--kills", "1", "--with", "wrapper"),
        *("--seed", str(SEED), *settings, "--", *command),
        env=env,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (kill,) = json.loads(done.stdout)["kills"]
    assert kill["exact"]
    lost_steps = kill["last_step"] - kill["resumed_from"]
    assert kill["lost_steps"] == lost_steps
    logs = folder / "drilled" / "logs"
    ended = [line["cause"] for line in read_events(logs / "status.jsonl") if line["event"] == "ended"]
    assert ended == ["killed", "done"], "a wrapper's death is a loss, whatever the other ranks said of it"
    reported = _holdfast(
        *("report", str(folder / "drilled" / "store"), "--events", str(logs), "--json"),
        *("--output", str(directory / "report.html")),
        env=env,
    )
    assert reported.returncode == 0, reported.stderr
    happened = json.loads(reported.stdout)["happened"]
    (interruption,) = [sentence for sentence in happened if "interrupted once" in sentence]
    assert "(killed: rank " in interruption
    events = read_logs([logs]).events
    signs = {event.time for event in events if event.event in {"rank_lost", "lost", "ending", "ended"}}
    assert gather_attempts(events)[0].stopped_at_unix == min(signs), "work lost counts to the first sign"


def _holdfast(*words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "holdfast", *words]
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=_SECONDS_MAX, check=False)
