"""Scenes for the pods of infra/kubernetes and the tasks of infra/skypilot: two ranks, one in each, and their stager."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from holdfast.net.key import new_key
from tests.hosts.network import running_network
from tests.infra.engine import PlayedJobSet
from tests.infra.namespaced_pods import NamespacedJobSet
from tests.infra.sky_tasks import PlayedJobGroup
from tests.infra.toolbox import INFRA
from tests.integration.jobs import in_a_pod
from tests.support.cluster import wait_until
from tests.support.free_port import free_port

__all__ = [
    "add_to_pod",
    "go_on",
    "jobset_document",
    "played",
    "played_group",
    "played_in_namespaces",
    "played_vms",
    "starts",
    "tls_additions",
    "trainer_document",
    "wait_for_ranks",
]

RANKS = 2
# Replace the file's sizes of a real machine, and its store.
SMALLER = {"HOLDFAST_RING_BYTES": "4MiB", "PET_NPROC_PER_NODE": "1"}


def jobset_document() -> Any:
    return _document("jobset")


def tls_additions() -> tuple[Any, Any]:
    """The additions for TLS in infra/kubernetes/README.md: to the stager's pod, and to the ranks' pods."""
    page = (INFRA / "kubernetes" / "README.md").read_text()
    section = page.partition("## With TLS")[2].partition("\n## ")[0]
    of_stager, of_ranks = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    return yaml.safe_load(of_stager), yaml.safe_load(of_ranks)


def add_to_pod(job: Any, part: Any) -> None:
    """Merge such an addition into the `spec` of a Job."""
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    container["env"] += part["env"]
    container["volumeMounts"] += part["volumeMounts"]
    pod["volumes"] += part["volumes"]


def trainer_document() -> Any:
    """The JobSet that Kubeflow's Trainer makes of trainjob-torch.yaml and its runtime.

    Its torch plugin gives the container `node` of the job `node` the variables of torchrun, with these values
    (pkg/runtime/framework/plugins/torch/torch.go in kubeflow/trainer).
    """
    runtime, train_job = _document("runtime-torch"), _document("trainjob-torch")
    name, trainer = train_job["metadata"]["name"], train_job["spec"]["trainer"]
    assert train_job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    spec = runtime["spec"]["template"]["spec"]
    (job,) = (one for one in spec["replicatedJobs"] if one["name"] == "node")
    job["template"]["spec"] |= {"completions": trainer["numNodes"], "parallelism": trainer["numNodes"]}
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    container |= {word: trainer[word] for word in ("image", "command", "args")}
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    container["env"] += [
        {"name": "PET_NNODES", "value": str(trainer["numNodes"])},
        {"name": "PET_NPROC_PER_NODE", "value": str(trainer["numProcPerNode"])},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": "29500"},
    ]
    return {"metadata": {"name": name}, "spec": spec}


def _document(name: str) -> Any:
    return yaml.safe_load((INFRA / "kubernetes" / f"{name}.yaml").read_text())


@contextlib.contextmanager
def played(folder: Path, document: Any = None) -> Iterator[PlayedJobSet]:
    """The pods of the document, by default of jobset.yaml; not yet started."""
    variables = _prepare(folder)
    secrets = {"holdfast-key": {"key": new_key()}}
    with PlayedJobSet(document or jobset_document(), folder, secrets=secrets, variables=variables) as jobset:
        yield jobset


@contextlib.contextmanager
def played_in_namespaces(
    folder: Path, document: Any, secrets: Mapping[str, Mapping[str, str]] | None = None
) -> Iterator[NamespacedJobSet]:
    """As `played`, each pod in namespaces of its own, with further secrets beside the key. Needs root."""
    variables, secrets = _prepare(folder), {"holdfast-key": {"key": new_key()}, **(secrets or {})}
    with (
        running_network() as network,
        NamespacedJobSet(document, folder, network, secrets=secrets, variables=variables) as jobset,
    ):
        yield jobset


@contextlib.contextmanager
def played_group(folder: Path) -> Iterator[PlayedJobGroup]:
    """The tasks of SkyPilot's job group; not yet started."""
    variables = {**_prepare(folder), "HOLDFAST_KEY": new_key()}
    with PlayedJobGroup(_sky_documents("job-group"), folder, variables) as group:
        yield group


@contextlib.contextmanager
def played_vms(folder: Path) -> Iterator[PlayedJobGroup]:
    """SkyPilot's two jobs on VMs, with the address that a user copies from the stager's log; not yet started."""
    stager, ranks = (_sky_documents(name)[0] for name in ("stager", "ranks"))
    closed = f"127.0.0.1:{free_port()}"
    variables = {
        **_prepare(folder),
        "HOLDFAST_KEY": new_key(),
        "HOLDFAST_STAGER": "127.0.0.1:29411",
        # The file's HOLDFAST_WATCH=auto asks each cloud's metadata server: none answers here.
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{closed}",
        "GCE_METADATA_HOST": closed,
        "HOLDFAST_AZURE_METADATA_URL": f"http://{closed}",
    }
    header = {"name": "vms", "primary_tasks": [ranks["name"]]}
    with PlayedJobGroup([header, stager, ranks], folder, variables) as jobs:
        yield jobs


def _sky_documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((INFRA / "skypilot" / f"{name}.yaml").read_text()))


def _prepare(folder: Path) -> dict[str, str]:
    (folder / "workspace").mkdir()
    shutil.copy(in_a_pod.__file__, folder / "workspace" / "train.py")
    (folder / "out").mkdir()
    return {
        **SMALLER,
        "HOLDFAST_STORE": str(folder / "store"),
        "HOLDFAST_CHUNK_BYTES": "64KiB",
        "HOLDFAST_EVENTS": str(folder / "events"),
        "OUT": str(folder / "out"),
    }


def wait_for_ranks(jobset: PlayedJobSet | PlayedJobGroup) -> None:
    """Wait until all ranks stand by in mid-run."""

    def ready() -> bool:
        assert all(pod.process.poll() is None for pod in jobset.pods), jobset.output()
        return all((jobset.folder / "out" / f"ready-{rank}").exists() for rank in range(RANKS))

    wait_until(ready, 240, lambda: f"the ranks do not come so far:\n{jobset.output()}")


def go_on(jobset: PlayedJobSet | PlayedJobGroup) -> None:
    """Let ranks of the next start run through, without standing by."""
    (jobset.folder / "out" / "go-on").touch()


def starts(jobset: PlayedJobSet | PlayedJobGroup, rank: int) -> list[int]:
    """The first step of each start of a rank."""
    return [int(line) for line in (jobset.folder / "out" / f"start-{rank}").read_text().split()]
