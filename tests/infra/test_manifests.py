"""infra/kubernetes against published models of Kubernetes, JobSet and Kubeflow's Trainer, and the exit codes' page."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from yamllint import linter  # type: ignore[import-untyped]
from yamllint.config import YamlLintConfig  # type: ignore[import-untyped]

from operator_side.supervise.exit_codes import RETRY_EXIT_CODE
from tests.infra.pods import add_to_pod, tls_additions
from tests.infra.toolbox import INFRA, Unavailable, manifest_python

FOLDER = INFRA / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
PAGE = INFRA.parent / "docs" / "exit-codes.md"


@pytest.fixture(scope="session")
def checker() -> Path:
    try:
        return manifest_python()
    except Unavailable as reason:
        pytest.skip(str(reason))


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]


def check(checker: Path, given: list[dict[str, Any]]) -> list[list[str]]:
    script = Path(__file__).with_name("check_manifests.py")
    done = subprocess.run(
        [checker, script], input=json.dumps(given), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, list)
    return found


def job_specs(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each replicated job of a JobSet or a runtime: its name, and the spec of its Job."""
    spec = document["spec"]
    for replicated in (spec["template"]["spec"] if "template" in spec else spec).get("replicatedJobs", []):
        yield replicated["name"], replicated["template"]["spec"]


JOBS = [
    pytest.param(path, job, id=f"{path.stem}-{name}")
    for path in FILES
    for document in documents(path)
    for name, job in job_specs(document)
]


def environment_of(job: dict[str, Any]) -> dict[str, Any]:
    """The variables of the job's container, with their literal values."""
    (container,) = job["template"]["spec"]["containers"]
    return {item["name"]: item.get("value") for item in container.get("env", [])}


def with_variable(name: str) -> list[Any]:
    return [
        pytest.param(path, job, id=f"{path.stem}-{job_name}")
        for path in FILES
        for document in documents(path)
        for job_name, job in job_specs(document)
        if name in environment_of(job)
    ]


def test_three_pods_hear_notices_and_three_have_a_ring() -> None:
    assert len(with_variable("HOLDFAST_WATCH")) == 3
    assert len(with_variable("HOLDFAST_RING_BYTES")) == 3


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_published_models_know_every_word(path: Path, checker: Path) -> None:
    given = documents(path)
    assert check(checker, given) == [[] for _ in given]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_manifests_pass_yamllint(path: Path) -> None:
    config = YamlLintConfig(
        "{extends: default, rules: {line-length: {max: 140}, document-start: disable, braces: "
        "{max-spaces-inside: 1}, octal-values: disable}}"
    )
    assert [str(problem) for problem in linter.run(path.read_text(), config)] == []


@pytest.mark.parametrize(("path", "job"), JOBS)
def test_no_pod_has_a_privilege_that_it_does_not_need(path: Path, job: dict[str, Any]) -> None:
    pod = job["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    (container,) = pod["containers"]
    context = container["securityContext"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["allowPrivilegeEscalation"] is False
    assert context.get("readOnlyRootFilesystem") is (
        None if "/usr/sbin/sshd" in container["command"] else True
    )
    for volume in pod["volumes"]:
        assert "hostPath" not in volume
        if "secret" in volume:
            assert volume["secret"]["defaultMode"] == 0o440


@pytest.mark.parametrize(("path", "job"), with_variable("HOLDFAST_WATCH"))
def test_each_wait_is_shorter_than_the_one_around_it(path: Path, job: dict[str, Any]) -> None:
    given = environment_of(job)
    assert given["HOLDFAST_WATCH"] == "sigterm"
    if path.stem == "runtime-mpi":  # the launcher forwards its variables to the ranks in the nodes' pods
        (document,) = documents(path)
        job = dict(job_specs(document))["node"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    if "lifecycle" in container:
        found = re.search(r"; sleep (\d+)$", container["lifecycle"]["preStop"]["exec"]["command"][-1])
        assert found
        waits = float(found[1])
    else:
        waits = float(container["args"][container["args"].index("--shutdown-timeout") + 1])
    assert float(given["HOLDFAST_WATCH_GRACE_SECONDS"]) < waits < pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize(("path", "job"), with_variable("HOLDFAST_RING_BYTES"))
def test_the_ring_has_room_in_memory(path: Path, job: dict[str, Any]) -> None:
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    given = environment_of(job)
    ring = gibibytes(given["HOLDFAST_RING_BYTES"].removesuffix("B"))
    (volume,) = (one for one in pod["volumes"] if one["name"] == "ring")
    assert volume["emptyDir"]["medium"] == "Memory"
    (mount,) = (one for one in container["volumeMounts"] if one["name"] == "ring")
    assert given["HOLDFAST_RUNTIME_DIR"].startswith(f"{mount['mountPath']}/")
    room = gibibytes(volume["emptyDir"]["sizeLimit"])
    assert ring + 16 / 1024 <= room <= gibibytes(container["resources"]["limits"]["memory"]) - 2
    assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]


def gibibytes(text: str) -> float:
    found = re.fullmatch(r"(\d+)Gi", text)
    assert found, text
    return float(found[1])


def test_the_page_of_exit_codes_says_what_the_files_say() -> None:
    blocks = re.findall(
        r"```yaml\n(.*?)```", PAGE.read_text().partition("## Kubernetes")[2].partition("\n## ")[0], re.DOTALL
    )
    shown: dict[str, Any] = {}
    for block in blocks:
        shown |= yaml.safe_load(block)
    (jobset,) = documents(FOLDER / "jobset.yaml")
    assert jobset["spec"]["failurePolicy"] == shown["failurePolicy"]
    (runtime,) = documents(FOLDER / "runtime-mpi.yaml")
    policy = runtime["spec"]["template"]["spec"]["failurePolicy"]
    assert policy == jobset["spec"]["failurePolicy"] | {
        "rules": [
            rule | {"targetReplicatedJobs": ["node", "launcher"]} for rule in shown["failurePolicy"]["rules"]
        ]
    }
    # Running ranks join a new pod of the stager; the loss of a rank ends this start.
    assert "`action: Ignore` in place of `Count`" in PAGE.read_text()
    for name, job in job_specs(jobset):
        assert job["backoffLimit"] == shown["backoffLimit"]
        disrupted, *others = job["podFailurePolicy"]["rules"]
        assert disrupted["action"] == ("Ignore" if name == "stager" else "Count")
        assert [disrupted | {"action": "Count"}, *others] == shown["podFailurePolicy"]["rules"]
        assert job["template"]["spec"]["restartPolicy"] == "Never"
        (rule,) = (one for one in job["podFailurePolicy"]["rules"] if "onExitCodes" in one)
        assert rule["onExitCodes"]["values"] == [RETRY_EXIT_CODE]


def test_the_stager_of_a_trainjob_is_replaced_as_that_of_the_jobset() -> None:
    (jobset,), (runtime,) = (documents(FOLDER / f"{stem}.yaml") for stem in ("jobset", "runtime-torch"))
    assert (
        dict(job_specs(runtime))["stager"]["podFailurePolicy"]
        == dict(job_specs(jobset))["stager"]["podFailurePolicy"]
    )


@pytest.mark.parametrize(("stem", "ranks"), [("jobset", "ranks"), ("runtime-torch", "node")])
def test_the_pages_tls_additions_fit_the_files(stem: str, ranks: str, checker: Path) -> None:
    (document,) = documents(FOLDER / f"{stem}.yaml")
    jobs = dict(job_specs(document))
    for job, part in zip((jobs["stager"], jobs[ranks]), tls_additions(), strict=True):
        add_to_pod(job, part)
        pod = job["template"]["spec"]
        (container,) = pod["containers"]
        for word in ("volumeMounts", "volumes"):
            names = [one["name"] for one in (pod | container)[word]]
            assert len(names) == len(set(names))
        assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    assert check(checker, [document]) == [[]]
    if stem == "jobset":
        host, _, _ = environment_of(jobs[ranks])["HOLDFAST_STAGER"].partition(":")
        assert f"`{host}`" in (FOLDER / "README.md").read_text()
