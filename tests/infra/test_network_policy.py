"""infra/kubernetes/network-policy.yaml, evaluated as a network does: which pods reach which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from tests.infra.test_manifests import FOLDER, documents, environment_of, job_specs

_RUN, _PART = "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/replicatedjob-name"
POLICIES = documents(FOLDER / "network-policy.yaml")


class Pod(NamedTuple):
    """A pod by its labels."""

    labels: Mapping[str, str]


def pod(run: str, part: str) -> Pod:
    return Pod({_RUN: run, _PART: part, "job-name": f"{run}-{part}-0"})


STAGER, RANK, NODE, LAUNCHER = (pod("holdfast", part) for part in ("stager", "ranks", "node", "launcher"))
STRANGER, OTHER_RANK, OTHER_STAGER = Pod({"app": "web"}), pod("other", "ranks"), pod("other", "stager")
OUTSIDE = None  # an address that no pod has


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    for one in selector.get("matchExpressions", []):
        assert one["operator"] in {"In", "NotIn"}
        if (labels.get(one["key"]) in one["values"]) != (one["operator"] == "In"):
            return False
    return True


def _allows(rules: list[dict[str, Any]], side: str, peer: Pod | None, port: int, protocol: str) -> bool:
    for rule in rules:
        peers = rule.get(side)
        by_peer = peers is None or (
            peer is not None and any(selects(one["podSelector"], peer.labels) for one in peers)
        )
        ports = rule.get("ports")
        by_port = ports is None or {"protocol": protocol, "port": port} in ports
        if by_peer and by_port:
            return True
    return False


def reaches(source: Pod | None, target: Pod | None, port: int, protocol: str = "TCP") -> bool:
    """Whether a connection may leave `source` and enter `target`; None is outside of the cluster."""
    for end, peer, kind, side in ((source, target, "Egress", "to"), (target, source, "Ingress", "from")):
        if end is None:
            continue
        concerned = [
            policy["spec"]
            for policy in POLICIES
            if selects(policy["spec"]["podSelector"], end.labels) and kind in policy["spec"]["policyTypes"]
        ]
        if concerned and not any(
            _allows(spec.get(kind.lower(), []), side, peer, port, protocol) for spec in concerned
        ):
            return False
    return True


@pytest.mark.parametrize(
    ("source", "target", "port", "protocol"),
    [
        (RANK, STAGER, 29411, "TCP"),
        (NODE, STAGER, 29411, "TCP"),
        (RANK, RANK, 29400, "TCP"),
        (RANK, RANK, 41234, "TCP"),
        (NODE, NODE, 51234, "UDP"),
        (LAUNCHER, NODE, 2222, "TCP"),
        (NODE, LAUNCHER, 45678, "TCP"),
        *((one, OUTSIDE, 443, "TCP") for one in (STAGER, RANK, NODE, LAUNCHER)),
        *((one, OUTSIDE, 53, "UDP") for one in (STAGER, RANK, NODE, LAUNCHER)),
    ],
)
def test_a_run_has_what_it_needs(source: Pod, target: Pod | None, port: int, protocol: str) -> None:
    assert reaches(source, target, port, protocol)


@pytest.mark.parametrize("source", [STRANGER, OTHER_RANK, OTHER_STAGER, OUTSIDE])
@pytest.mark.parametrize("target", [STAGER, RANK, NODE, LAUNCHER])
@pytest.mark.parametrize("port", [29411, 29400, 2222, 9471, 443, 53])
def test_the_network_policy_lets_no_other_source_reach_a_pod(
    source: Pod | None, target: Pod, port: int
) -> None:
    assert not reaches(source, target, port)


def test_the_stager_has_one_port_and_begins_no_talk_with_ranks() -> None:
    assert not reaches(RANK, STAGER, 9471)
    assert not reaches(STAGER, STAGER, 29411)
    assert not reaches(STAGER, RANK, 29400)
    assert not reaches(RANK, OUTSIDE, 25)
    assert reaches(STRANGER, OTHER_STAGER, 29411), "of other runs it says nothing"


def test_names_and_port_are_those_of_the_other_files() -> None:
    (jobset,) = documents(FOLDER / "jobset.yaml")
    run = jobset["metadata"]["name"]
    jobs = dict(job_specs(jobset))
    assert {policy["spec"]["podSelector"]["matchLabels"][_RUN] for policy in POLICIES} == {run}
    assert jobs.keys() == {STAGER.labels[_PART], RANK.labels[_PART]}
    for stem, parts in (("torch", {"stager", "node"}), ("mpi", {"node", "launcher"})):
        (runtime,) = documents(FOLDER / f"runtime-{stem}.yaml")
        assert {name for name, _ in job_specs(runtime)} == parts
        (job,) = documents(FOLDER / f"trainjob-{stem}.yaml")
        assert job["metadata"]["name"] == run  # its JobSet has the same name
    (container,) = jobs["stager"]["template"]["spec"]["containers"]
    (listens,) = (one["containerPort"] for one in container["ports"])
    assert environment_of(jobs["ranks"])["HOLDFAST_STAGER"].endswith(f":{listens}")
    assert reaches(RANK, STAGER, listens)
