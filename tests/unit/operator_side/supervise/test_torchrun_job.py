"""The job of `holdfast run --launcher torchrun`, with a simulated stager and a sleeping process as torchrun."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import cast

import pytest

from holdfast.notify.alert import alert_for
from operator_side.supervise.kept_stager import KeptStager
from operator_side.supervise.torchrun_job import (
    TorchrunJob,
    as_supervisor_event,
    torchrun_arguments,
    torchrun_line,
)

_SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
_SUCCEEDS = [sys.executable, "-S", "-c", ""]


class MadeUpStager:
    """Listens at once, and has ended from then on.

    Args:
        status: Its exit code.
        restarts_max: How many restarts it is given.
    """

    address, restarts, has_leftover_ring = "127.0.0.1:29411", 0, False

    def __init__(self, *, status: int | None = None, restarts_max: int = 0, listens: bool = True) -> None:
        self._status, self._restarts_max, self._listens = status, restarts_max, listens
        self.stopped = False

    def check_listening(self) -> bool:
        return self._listens

    def poll(self) -> int | None:
        return self._status

    def schedule_restart(self) -> float | None:
        if self.restarts >= self._restarts_max:
            return None
        self.restarts += 1
        return 0.0

    def restart_if_due(self) -> None:
        pass

    def stop(self) -> None:
        self.stopped = True

    def wait_for_exit(self, seconds: float) -> bool:
        del seconds
        return True

    def close(self) -> None:
        pass


def job(stager: MadeUpStager, line: list[str], folder: Path) -> TorchrunJob:
    return TorchrunJob(
        cast(KeptStager, stager),
        line,
        os.environ,
        events=folder / "events.jsonl",
        newest_step=-1,
        grace_seconds=5.0,
    )


def test_torchrun_job_ends_the_ranks_when_the_stager_has_died_too_often(tmp_path: Path) -> None:
    stager = MadeUpStager(status=-signal.SIGKILL, restarts_max=2)
    end = job(stager, _SLEEPS, tmp_path).run()
    assert end.code == 9
    assert end.message == (
        "the stager was killed by SIGKILL, 3 times in a row without a newer checkpoint; the ranks are ended"
    )
    assert stager.stopped


def test_torchrun_job_starts_no_rank_beside_a_stager_that_has_refused_its_settings(tmp_path: Path) -> None:
    end = job(MadeUpStager(status=2, listens=False), ["no such program"], tmp_path).run()
    assert end == (2, "the stager has ended before any rank was started")


def test_torchrun_job_gives_the_ranks_their_grace(tmp_path: Path) -> None:
    """By the variable, since torch 2.9 has no --shutdown-timeout."""
    told = tmp_path / "told"
    says = f"import os; open({str(told)!r}, 'w').write(os.environ['TORCH_ELASTIC_SHUTDOWN_TIMEOUT'])"
    assert job(MadeUpStager(), [sys.executable, "-S", "-c", says], tmp_path).run() == (0, "")
    assert told.read_text() == "5"


def test_torchrun_job_counts_a_newer_checkpoint_as_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stager = MadeUpStager()
    under_test = job(stager, _SUCCEEDS, tmp_path)
    stager.restarts = 2
    (tmp_path / "events.jsonl").write_text('{"event": "staged", "role": "stager", "step": 7}\n')
    assert under_test.run() == (0, "")
    assert (under_test.newest_step, stager.restarts) == (7, 0)


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (["train.py", "--epochs", "3"], ["train.py", "--epochs", "3"]),
        (["-m", "package.train"], ["-m", "package.train"]),
        (["python", "train.py"], ["--no-python", "python", "train.py"]),
    ],
)
def test_torchrun_arguments_tell_scripts_and_modules_from_programs(
    command: list[str], arguments: list[str]
) -> None:
    assert torchrun_arguments(command) == arguments


def test_torchrun_line_ties_the_ranks_and_has_only_options_of_the_oldest_torch() -> None:
    line = torchrun_line(["train.py"], ranks=2, restarts_max=0)
    assert line[line.index("--max-restarts") + 1] == "0"
    assert {word for word in line[: line.index("operator_side.supervise.tied")] if word.startswith("--")} == {
        "--standalone",
        "--nproc-per-node",
        "--max-restarts",
        "--no-python",
    }
    tied = line.index("operator_side.supervise.tied")
    assert line[tied + 1 :] == [str(int(signal.SIGKILL)), "0", sys.executable, "-u", "train.py"]


def test_torchrun_job_tells_people_of_lost_ranks_and_of_the_proof_as_a_supervisor_does() -> None:
    lost = alert_for(
        as_supervisor_event({"role": "stager", "event": "rank_lost", "lost_rank": 1, "reason": "silent"})
    )
    assert lost is not None
    assert (lost.kind, lost.text) == ("killed", "rank 1 is lost, and torchrun restarts the ranks: silent")
    verdict = {
        "role": "stager",
        "event": "resume_proof",
        "verdict": "differs",
        "text": "resume differs: data",
    }
    proof = alert_for(as_supervisor_event(verdict))
    assert proof is not None
    assert (proof.kind, proof.text) == ("resume_proof", "resume differs: data")
    back = alert_for(
        as_supervisor_event({"role": "stager", "event": "stager_ready", "attempt": 2, "returned": True})
    )
    assert back is not None
    assert (back.kind, back.text) == ("stager_back", "the ranks have returned to the stager, as attempt 2")
    staged = {"role": "stager", "event": "staged", "step": 3}
    assert as_supervisor_event(staged) is staged
