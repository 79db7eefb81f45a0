"""The command lines of infra/kubernetes/jobset.yaml in pods that are namespaces, by the file's own names and ports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from operator_side.supervise.exit_codes import AGAIN
from tests.hosts.network import why_not
from tests.infra.namespaced_pods import NamespacedJobSet
from tests.infra.pods import RANKS, go_on, jobset_document, played_in_namespaces, starts, wait_for_ranks
from tests.integration.jobs.in_a_pod import EVERY, MET_AT, STEPS, counted_after

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "pods can be namespaces here")

RESTARTED = "RestartJobSetAndIgnoreMaxRestarts"


def _completed_from(jobset: NamespacedJobSet, step_min: int) -> None:
    """The last start went on at this step or later, and no step was left out or done twice."""
    assert jobset.settle() == "Completed", jobset.output()
    for rank in range(RANKS):
        before, after = starts(jobset, rank)
        assert (before, after >= step_min) == (0, True)
        assert (jobset.folder / "out" / f"final-{rank}").read_text() == str(counted_after(after))


def test_a_pod_that_is_told_to_go_is_started_again_with_the_others_at_other_addresses(tmp_path: Path) -> None:
    with played_in_namespaces(tmp_path, jobset_document()) as jobset:
        jobset.start()
        wait_for_ranks(jobset)
        first, names = list(jobset.pods), (tmp_path / "names").read_text()
        go_on(jobset)
        jobset.of("ranks")[1].terminate()
        assert jobset.settle() == RESTARTED, jobset.output()
        assert [pod.process.returncode for pod in first] == [AGAIN] * 3, jobset.output()
        assert not set(names.splitlines()[1:]) & set((tmp_path / "names").read_text().splitlines())
        # The step that the notice made them save is later than any that they would have saved without it.
        _completed_from(jobset, MET_AT + 2)
        assert "saved because rank 1" in jobset.output()


def test_a_node_that_is_gone_without_a_word_has_all_pods_started_again(tmp_path: Path) -> None:
    document = jobset_document()
    _shorten(document)
    with played_in_namespaces(tmp_path, document) as jobset:
        jobset.start()
        wait_for_ranks(jobset)
        go_on(jobset)
        jobset.of("ranks")[1].lose_node()
        assert jobset.settle() == RESTARTED, jobset.output()
        _completed_from(jobset, STEPS - EVERY)


def _shorten(document: Any) -> None:
    """The rank that is left waits for the one that is lost until it is killed: for 8 seconds, and not for 120."""
    (ranks,) = (one for one in document["spec"]["replicatedJobs"] if one["name"] == "ranks")
    pod = ranks["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    pod["terminationGracePeriodSeconds"] = 8
    container["args"][container["args"].index("--shutdown-timeout") + 1] = "5"
    (grace,) = (one for one in container["env"] if one["name"] == "HOLDFAST_WATCH_GRACE_SECONDS")
    grace["value"] = "3"
