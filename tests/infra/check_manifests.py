"""Check Kubernetes manifests by published models: `check_manifests.py`, documents (JSON) on stdin, faults on stdout.

Run by the Python of `toolbox.manifest_python`. JobSet and Kubeflow's Trainer: the models of kubeflow-trainer-api, which
drop unknown fields, so their output is compared with their input. Kubernetes itself: the strict JSON schemas of
kubernetes-validate.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import kubernetes_validate  # type: ignore[import-not-found]
from kubeflow_trainer_api import models  # type: ignore[import-not-found]

KUBERNETES = "1.37"
MODELS = {
    "JobSet": ("jobset.x-k8s.io/v1alpha2", models.JobsetV1alpha2JobSet),
    "ClusterTrainingRuntime": ("trainer.kubeflow.org/v1alpha1", models.TrainerV1alpha1ClusterTrainingRuntime),
    "TrainJob": ("trainer.kubeflow.org/v1alpha1", models.TrainerV1alpha1TrainJob),
}


def faults(document: dict[str, Any]) -> Iterator[str]:
    kind = document["kind"]
    if kind not in MODELS:
        yield from _schema_faults(document, kind)
        return
    version, model = MODELS[kind]
    if document["apiVersion"] != version:
        yield f"{kind}: apiVersion {document['apiVersion']}, expected {version}"
    try:
        known = model.from_dict(document).to_dict()
    except ValueError as error:
        yield f"{kind}: {error}"
        return
    lost = list(_lost(document, known, kind))
    yield from lost
    if lost:
        return
    spec = document["spec"]
    for replicated in (spec["template"]["spec"] if "template" in spec else spec).get("replicatedJobs", []):
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": replicated["name"]}}
        job["spec"] = replicated["template"]["spec"]
        yield from _schema_faults(job, f"{kind}, job {replicated['name']}")


def _schema_faults(document: dict[str, Any], where: str) -> Iterator[str]:
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{where}: {error.message} at {'.'.join(map(str, error.path))}"


def _lost(given: Any, known: Any, where: str) -> Iterator[str]:
    if isinstance(given, dict) and isinstance(known, dict):
        for name, value in given.items():
            if name in known:
                yield from _lost(value, known[name], f"{where}.{name}")
            else:
                yield f"{where}: no field {name}"
    elif isinstance(given, list) and isinstance(known, list):
        for number, (one, other) in enumerate(zip(given, known, strict=True)):
            yield from _lost(one, other, f"{where}[{number}]")


if __name__ == "__main__":
    json.dump([list(faults(document)) for document in json.load(sys.stdin)], sys.stdout)
