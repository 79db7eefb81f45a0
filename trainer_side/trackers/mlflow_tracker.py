"""MLflow keeps every point, so points of steps that are trained again are not logged again.

A training that was rewound to an older step gets a new run: MLflow cannot remove points, and those of the abandoned
branch would stay between the new ones.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer_side.trackers.tracker import PREFIX, Mark, StartPoint, Tracker

if TYPE_CHECKING:
    from mlflow import MlflowClient

KIND = "mlflow"


class MlflowTracker(Tracker):
    """A run, from `mlflow.start_run`. `client`: Of its tracking store. `last_steps`: Newest step of each metric."""

    kind = KIND

    def __init__(self, run: Any, client: MlflowClient, last_steps: Mapping[str, int]) -> None:
        self.run, self._client, self._last_steps = run, client, dict(last_steps)
        self.run_id = run.info.run_id
        own = [step for name, step in last_steps.items() if not name.startswith(f"{PREFIX}/")]
        self.last_step = max(own, default=-1)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        new = [name for name in metrics if step > self._last_steps.get(name, -1)]
        self._send({name: metrics[name] for name in new}, step)

    def mark(self, marks: Sequence[Mark]) -> None:
        for mark in marks:
            self._send({mark.title: mark.value}, mark.step)
            if mark.text:
                self._client.set_tag(self.run_id, f"{PREFIX}.{mark.name}.{mark.value:g}", mark.text)

    def _send(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        points = [Metric(name, float(value), now_ms, step) for name, value in metrics.items()]
        if points:
            self._client.log_batch(self.run_id, metrics=points)


def begin(start: StartPoint, options: Mapping[str, Any]) -> MlflowTracker:
    """Continue the active run, or the one in the checkpoint; else start one."""
    import mlflow

    saved, more = start.runs.get(KIND), dict(options)
    if saved is not None and start.branched:
        more["tags"] = {**(more.get("tags") or {}), f"{PREFIX}.rewound_from": saved}
    elif saved is not None:
        more.setdefault("run_id", saved)
    run = mlflow.active_run() or mlflow.start_run(**more)
    client = mlflow.MlflowClient()
    # `RunData.metrics` has only values; its protocol buffer also has the newest step of each, in one request.
    newest = client.get_run(run.info.run_id).data.to_proto().metrics
    return MlflowTracker(run, client, {one.key: one.step for one in newest})
