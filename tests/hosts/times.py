"""From the loss to training again, phase by phase, by the supervisor's own record; kept for docs/hosts.md."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.hosts.cluster import Cluster
from tests.support.job import REPOSITORY

__all__ = ["PHASES", "RESULTS", "keep"]

RESULTS = Path(os.environ.get("HOLDFAST_HOSTS_RESULTS", REPOSITORY / "build" / "hosts"))
PHASES = ("lost", "ended", "launched", "joined", "restored", "training")


def keep(cluster: Cluster, scenario: str, *, start: int) -> None:
    """Record when each phase of the second attempt was reached, in seconds after the strike."""
    at = {}
    for phase in PHASES:
        lines = [line for line in cluster.status(phase) if line["time"] >= cluster.struck_at_unix]
        if lines:
            at[phase] = round(lines[0]["time"] - cluster.struck_at_unix, 2)
    if "lost" not in at and (lines := cluster.status("ending")):
        at["lost"] = round(lines[0]["time"] - cluster.struck_at_unix, 2)
    # Phases later than `training` belong to the end of the run.
    at = {phase: seconds for phase, seconds in at.items() if seconds <= at["training"]}
    first = [line["ranks"] for line in cluster.status("launched")]
    result: dict[str, Any] = {
        "scenario": scenario,
        "ranks": first,
        "at_seconds": at,
        "steps_done_again": cluster.struck_step - start,
        "rate": cluster.rate,
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": round(os.getloadavg()[0], 1),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    name = scenario.replace(" ", "-").replace(",", "")
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
