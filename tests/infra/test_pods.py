"""The command lines of infra/kubernetes/jobset.yaml as processes: pods are evicted, or lost with their node."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from operator_side.supervise.exit_codes import RETRY_EXIT_CODE
from tests.infra.pods import go_on, played, starts, wait_for_ranks
from tests.integration.jobs.in_a_pod import MET_AT
from tests.support.cluster import wait_until


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
        # The stager's pod was evicted too, and had written all staged steps.
        assert [pod.process.returncode for pod in first] == [RETRY_EXIT_CODE] * 3, jobset.output()
        assert jobset.settle() == "Completed", jobset.output()
        for rank in range(2):
            before, after = starts(jobset, rank)
            assert before == 0
            # The step saved because of the notice is later than any step due without it.
            assert after > MET_AT + 1
        assert "saved because rank 1" in jobset.output()


@pytest.mark.parametrize("loss", ["evicted", "node lost"])
def test_the_stagers_pod_is_replaced_and_the_running_ranks_join_it(tmp_path: Path, loss: str) -> None:
    with played(tmp_path) as jobset:
        jobset.start()
        wait_for_ranks(jobset)
        (stager,), ranks = jobset.of("stager"), jobset.of("ranks")
        if loss == "evicted":
            stager.evict()
        else:
            stager.lose_node()
        assert jobset.settle() == "ReplacePod", jobset.output()
        assert stager.process.returncode == (RETRY_EXIT_CODE if loss == "evicted" else -signal.SIGKILL)
        wait_until(
            lambda: jobset.output().count("the stager is reached again") == len(ranks), 120, jobset.output
        )
        assert jobset.of("ranks") == ranks
        assert all(pod.process.poll() is None for pod in ranks), jobset.output()
        # The checkpoint of the next notice goes through the stager's new pod.
        go_on(jobset)
        ranks[1].terminate()
        assert jobset.settle() == "RestartJobSetAndIgnoreMaxRestarts", jobset.output()
        assert jobset.settle() == "Completed", jobset.output()
        assert jobset.actions == ["ReplacePod", "RestartJobSetAndIgnoreMaxRestarts"]
        for rank in range(2):
            before, after = starts(jobset, rank)
            assert (before, after > MET_AT + 1) == (0, True)
        assert "saved because rank 1" in jobset.output()
