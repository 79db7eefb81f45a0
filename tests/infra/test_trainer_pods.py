"""The commands of Kubeflow's torch runtime as processes, from the JobSet that its Trainer makes of runtime and job."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from operator_side.supervise.exit_codes import RETRY_EXIT_CODE
from tests.infra.pods import go_on, played, starts, trainer_document, wait_for_ranks
from tests.integration.jobs.in_a_pod import EVERY, MET_AT, STEPS, counted_after


def test_a_pod_of_a_trainjob_that_is_told_to_go_has_the_run_started_again(tmp_path: Path) -> None:
    with played(tmp_path, trainer_document()) as jobset:
        jobset.start()
        wait_for_ranks(jobset)
        first = list(jobset.pods)
        go_on(jobset)
        jobset.of("node")[1].terminate()
        assert jobset.settle() == "RestartJobSetAndIgnoreMaxRestarts", jobset.output()
        assert [pod.process.returncode for pod in first] == [RETRY_EXIT_CODE] * 3, jobset.output()
        assert jobset.settle() == "Completed", jobset.output()
        for rank in range(2):
            before, after = starts(jobset, rank)
            assert before == 0
            # The step saved because of the notice is later than any step due without it.
            assert after > MET_AT + 1
            assert (tmp_path / "out" / f"final-{rank}").read_text() == str(counted_after(after))


def test_a_killed_rank_of_a_trainjob_has_the_run_started_again(tmp_path: Path) -> None:
    with played(tmp_path, trainer_document()) as jobset:
        jobset.start()
        wait_for_ranks(jobset)
        go_on(jobset)
        os.kill(int((tmp_path / "out" / "pid-1").read_text()), signal.SIGKILL)
        assert jobset.settle() == "RestartJobSetAndIgnoreMaxRestarts", jobset.output()
        assert jobset.settle() == "Completed", jobset.output()
        for rank in range(2):
            before, after = starts(jobset, rank)
            assert (before, after >= STEPS - EVERY) == (0, True)
            assert (tmp_path / "out" / f"final-{rank}").read_text() == str(counted_after(after))
