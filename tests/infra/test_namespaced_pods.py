"""The command lines of infra/kubernetes/jobset.yaml in pods that are namespaces, with the file's names and ports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from operator_side.supervise.exit_codes import RETRY_EXIT_CODE
from tests.hosts.network import why_not
from tests.infra.namespaced_pods import NamespacedJobSet
from tests.infra.pods import (
    RANKS,
    add_to_pod,
    go_on,
    jobset_document,
    played_in_namespaces,
    starts,
    tls_additions,
    trainer_document,
    wait_for_ranks,
)
from tests.integration.jobs.in_a_pod import EVERY, MET_AT, STEPS, counted_after
from tests.support.certificates import TestAuthority
from tests.support.events import read_events

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "pods can be namespaces here")

RESTARTED = "RestartJobSetAndIgnoreMaxRestarts"


def _completed_from(jobset: NamespacedJobSet, step_min: int) -> None:
    """Check that the last start began at this step or later, and that each step ran exactly once."""
    assert jobset.settle() == "Completed", jobset.output()
    for rank in range(RANKS):
        before, after = starts(jobset, rank)
        assert (before, after >= step_min) == (0, True)
        assert (jobset.folder / "out" / f"final-{rank}").read_text() == str(counted_after(after))


def test_over_tls_a_pod_that_is_told_to_go_is_started_again_with_the_others(tmp_path: Path) -> None:
    """With the page's additions for TLS. Restarted pods have new addresses; the certificate names the stager."""
    document = jobset_document()
    secrets = _add_tls(document, tmp_path)
    with played_in_namespaces(tmp_path, document, secrets) as jobset:
        jobset.start()
        wait_for_ranks(jobset)
        first, names = list(jobset.pods), (tmp_path / "names").read_text()
        go_on(jobset)
        jobset.of("ranks")[1].terminate()
        assert jobset.settle() == RESTARTED, jobset.output()
        assert [pod.process.returncode for pod in first] == [RETRY_EXIT_CODE] * 3, jobset.output()
        assert not set(names.splitlines()[1:]) & set((tmp_path / "names").read_text().splitlines())
        # The step saved because of the notice is later than any step due without it.
        _completed_from(jobset, MET_AT + 2)
        assert "saved because rank 1" in jobset.output()
        ready = [line for line in read_events(tmp_path / "events") if line["event"] == "stager_ready"]
        assert [line["transport"] for line in ready] == ["tls", "tls"]


def test_a_pod_of_a_trainjob_that_is_told_to_go_is_started_again_with_the_others(tmp_path: Path) -> None:
    """Kubeflow's torch runtime: torchrun's agents meet at the name that the Trainer sets."""
    with played_in_namespaces(tmp_path, trainer_document()) as jobset:
        jobset.start()
        wait_for_ranks(jobset)
        first, names = list(jobset.pods), (tmp_path / "names").read_text()
        go_on(jobset)
        jobset.of("node")[1].terminate()
        assert jobset.settle() == RESTARTED, jobset.output()
        assert [pod.process.returncode for pod in first] == [RETRY_EXIT_CODE] * 3, jobset.output()
        assert not set(names.splitlines()[1:]) & set((tmp_path / "names").read_text().splitlines())
        _completed_from(jobset, MET_AT + 2)


@pytest.mark.parametrize("kind", ["ranks", "node"])
def test_a_node_that_is_gone_without_a_word_has_all_pods_started_again(tmp_path: Path, kind: str) -> None:
    """From jobset.yaml, and from Kubeflow's torch runtime."""
    document = jobset_document() if kind == "ranks" else trainer_document()
    _shorten(document, kind)
    with played_in_namespaces(tmp_path, document) as jobset:
        jobset.start()
        wait_for_ranks(jobset)
        go_on(jobset)
        jobset.of(kind)[1].lose_node()
        assert jobset.settle() == RESTARTED, jobset.output()
        _completed_from(jobset, STEPS - EVERY)


def _add_tls(document: Any, folder: Path) -> dict[str, dict[str, str]]:
    jobs = {one["name"]: one["template"]["spec"] for one in document["spec"]["replicatedJobs"]}
    for job, part in zip((jobs["stager"], jobs["ranks"]), tls_additions(), strict=True):
        add_to_pod(job, part)
    authority = TestAuthority(folder)
    pair = authority.sign("stager", host="holdfast-stager-0-0.holdfast")
    return {
        "holdfast-tls": {"tls.crt": pair.cert.read_text(), "tls.key": pair.key.read_text()},
        "holdfast-ca": {"ca.pem": authority.cert.read_text()},
    }


def _shorten(document: Any, kind: str) -> None:
    """Shorten the surviving rank's wait for the lost one, until it is killed, from 120 to 8 seconds."""
    (ranks,) = (one for one in document["spec"]["replicatedJobs"] if one["name"] == kind)
    pod = ranks["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    pod["terminationGracePeriodSeconds"] = 8
    container["args"][container["args"].index("--shutdown-timeout") + 1] = "5"
    (grace,) = (one for one in container["env"] if one["name"] == "HOLDFAST_WATCH_GRACE_SECONDS")
    grace["value"] = "3"
