"""The command lines of infra/kubernetes/jobset.yaml as processes: a pod is told to go, and the run is started again."""

from __future__ import annotations

from pathlib import Path

from operator_side.supervise.exit_codes import AGAIN
from tests.infra.pods import go_on, played, starts, wait_for_ranks
from tests.integration.jobs.in_a_pod import MET_AT


def test_a_pod_that_is_told_to_go_is_started_again_with_the_others_and_the_run_resumes(
    tmp_path: Path,
) -> None:
    with played(tmp_path) as jobset:
        jobset.start()
        wait_for_ranks(jobset)
        first = list(jobset.pods)
        go_on(jobset)
        jobset.of("ranks")[1].terminate()
        assert jobset.settle() == "RestartJobSetAndIgnoreMaxRestarts", jobset.output()
        # The stager's pod, too, was told to go; it had written what was staged.
        assert [pod.process.returncode for pod in first] == [AGAIN] * 3, jobset.output()
        assert jobset.settle() == "Completed", jobset.output()
        for rank in range(2):
            before, after = starts(jobset, rank)
            assert before == 0
            # The step that the notice made them save is later than any that they would have saved without it.
            assert after > MET_AT + 1
        assert "saved because rank 1" in jobset.output()
