"""The command lines of infra/kubernetes/jobset.yaml as processes: lost, killed, with a bug."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from operator_side.supervise.exit_codes import RETRY_EXIT_CODE
from tests.infra.pods import go_on, jobset_document, played, starts, wait_for_ranks
from tests.integration.jobs.in_a_pod import EVERY, STEPS

# The step to run after the newest checkpoint before the ranks stand by.
SAVED = STEPS // EVERY * EVERY - EVERY


def test_a_node_that_is_lost_starts_the_run_again(tmp_path: Path) -> None:
    with played(tmp_path) as jobset:
        jobset.start()
        wait_for_ranks(jobset)
        go_on(jobset)
        jobset.of("ranks")[1].lose_node()
        assert jobset.settle() == "RestartJobSetAndIgnoreMaxRestarts", jobset.output()
        assert jobset.settle() == "Completed", jobset.output()
        for rank in range(2):
            before, after = starts(jobset, rank)
            assert (before, after >= SAVED) == (0, True)


def test_a_killed_rank_is_started_again_beside_the_stager_that_stays(tmp_path: Path) -> None:
    """By JobSet's action behind its feature gate RestartJob."""
    document = jobset_document()
    (rule,) = (one for one in document["spec"]["failurePolicy"]["rules"] if one["name"] == "preempted")
    rule["action"] = "RestartJobAndIgnoreMaxRestarts"
    with played(tmp_path, document) as jobset:
        jobset.start()
        wait_for_ranks(jobset)
        (stager,) = jobset.of("stager")
        go_on(jobset)
        os.kill(int((tmp_path / "out" / "pid-1").read_text()), signal.SIGKILL)
        assert jobset.settle() == "RestartJobAndIgnoreMaxRestarts", jobset.output()
        assert jobset.of("stager") == [stager]
        assert stager.process.poll() is None
        assert jobset.settle() == "Completed", jobset.output()
        assert stager.process.returncode == RETRY_EXIT_CODE, jobset.output()
        for rank in range(2):
            before, after = starts(jobset, rank)
            assert (before, after >= SAVED) == (0, True)


def test_a_bug_ends_the_run_at_once_or_after_one_more_start(tmp_path: Path) -> None:
    """The rank with the bug or its survivor may end first; the first to end decides."""
    with played(tmp_path) as jobset:
        (tmp_path / "out" / "bug").touch()
        jobset.start()
        for _ in range(3):
            if jobset.settle() == "FailJobSet":
                break
        assert jobset.actions[-1] == "FailJobSet", jobset.output()
        assert jobset.actions[:-1] == ["RestartJobSetAndIgnoreMaxRestarts"] * (len(jobset.actions) - 1)
        assert "the bug of rank 1" in jobset.output()
        assert not list((tmp_path / "out").glob("final-*"))
