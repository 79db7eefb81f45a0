"""Reads runs of experiment trackers back with their own libraries: `python tracked_runs.py DIRECTORY EVENTS`.

Prints one JSON document: tracker → name of a chart → `[step, value]`, in the order in which they were logged; and what
else the library has of the run. It runs where the libraries are (tests/support/trackers.py).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from trainer_side.trackers import wandb_tracker

Charts = dict[str, list[tuple[int, float]]]


def main() -> None:
    directory, events = Path(sys.argv[1]), sys.argv[2]
    print(json.dumps({"wandb": of_wandb(directory), "tensorboard": of_events(events), "mlflow": of_mlflow()}))


def of_events(folder: str) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(folder, size_guidance={"scalars": 0, "tensors": 0}).Reload()
    charts = {
        name: [(one.step, one.value) for one in found.Scalars(name)] for name in found.Tags()["scalars"]
    }
    texts = [
        one.tensor_proto.string_val[0].decode()
        for name in found.Tags()["tensors"]
        for one in found.Tensors(name)
    ]
    return {"charts": charts, "texts": texts, "runs": len(list(Path(folder).parent.glob("events*")))}


def of_mlflow() -> dict[str, Any]:
    from mlflow import MlflowClient

    client = MlflowClient()
    runs = client.search_runs(["0"])
    charts = {
        name: [(one.step, one.value) for one in client.get_metric_history(runs[0].info.run_id, name)]
        for name in runs[0].data.metrics
    }
    texts = [text for tag, text in runs[0].data.tags.items() if tag.startswith("holdfast.")]
    return {"charts": charts, "texts": texts, "runs": len(runs)}


def of_wandb(directory: Path) -> dict[str, Any]:
    """All attempts together, as `wandb sync` uploads them into the run of their id."""
    from wandb.proto.wandb_internal_pb2 import Record

    charts: Charts = {}
    texts: list[str] = []
    ids = set()
    axes = {}
    for file in sorted((directory / "wandb").glob("offline-run-*/run-*.wandb")):
        ids.add(file.stem)
        for body in wandb_tracker._records(file.read_bytes()):
            record = Record.FromString(body)
            for item in [*record.config.update, *record.run.config.update]:
                texts += (
                    [json.loads(item.value_json)] if "holdfast" in (item.key or item.nested_key[0]) else []
                )
            if record.HasField("metric"):
                axes[record.metric.name] = record.metric.step_metric
            if not record.HasField("history"):
                continue
            row = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            for name, value in row.items():
                if not name.startswith(("_", "holdfast_step/")):
                    axis = axes.get(name) or "_step"
                    charts.setdefault(name, []).append((int(row[axis]), value))
    return {"charts": charts, "texts": texts, "runs": len(ids)}


if __name__ == "__main__":
    main()
