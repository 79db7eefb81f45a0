"""Event logs for the tests of the report: a real drilled run, and lines that the product's own EventLog writes.

drilled-*.jsonl are what `holdfast run` left of four attempts with three kills; of the events those of attempts 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from holdfast.telemetry.event_reading import read_logs
from holdfast.telemetry.events import EventLog
from holdfast.telemetry.rows import StoredCheckpoint
from operator_side.report.facts import RunFacts, gather_facts
from operator_side.report.page import report_page

HERE = Path(__file__).parent
STATUS, EVENTS = HERE / "drilled-status.jsonl", HERE / "drilled-events.jsonl"
T0 = 1_800_000_000.0
Line = tuple[
    float, str, str, Mapping[str, Any]
]  # seconds after T0, role, event, fields; `rank` and `step` in them


def written(path: Path, lines: Iterable[Line]) -> Path:
    """A log with these lines, as the product writes it."""
    now = [0.0]
    clock: Callable[[], float] = lambda: T0 + now[0]  # noqa: E731
    logs: dict[tuple[str, Any], EventLog] = {}
    for at, role, event, fields in lines:
        now[0] = at
        key = (role, None if role == "supervisor" else fields.get("rank"))
        log = logs.setdefault(key, EventLog(path, role=role, rank=key[1], clock=clock))
        rest = {
            name: value
            for name, value in fields.items()
            if name != "step" and (name != "rank" or key[1] is None)
        }
        if role == "supervisor" and "step" in fields:
            rest["step"] = fields["step"]
            log.emit(event, rest)
        else:
            log.emit(event, rest, step=fields.get("step"))
    for log in logs.values():
        log.close()
    if not path.exists():
        path.touch()
    return path


def checkpoint(step: int, at: float, *, attempt: int = 1, ranks: int = 2, stall: float = 0.1) -> list[Line]:
    """The lines of a checkpoint that goes well: staged after one second, durable after two, read back after three."""
    nbytes = 1 << 20
    lines: list[Line] = []
    for rank in range(ranks):
        said = {
            "rank": rank,
            "step": step,
            "saved_at_unix": T0 + at,
            "save_seconds": stall,
            "cst_seconds": stall,
            "host": f"spot-{rank}",
            "slice_bytes": nbytes // ranks,
        }
        lines.append((at + 0.2, "trainer", "save", said))
        lines.append((at + 1.1, "trainer", "staged", said | {"sending_seconds": 0.3, "staged_seconds": 1.0}))
    lines += [
        (at + 0.5, "flusher", "flush_began", {"step": step, "attempt": attempt, "image_bytes": nbytes}),
        (at + 1.0, "stager", "staged", {"step": step, "pgt1_seconds": 1.0, "image_bytes": nbytes}),
        (
            at + 2.0,
            "flusher",
            "durable",
            {
                "step": step,
                "attempt": attempt,
                "image_bytes": nbytes,
                "pgt2_seconds": 2.0,
                "record": {},
                "file": "f",
            },
        ),
        (at + 3.0, "flusher", "verified", {"step": step, "attempt": attempt, "note": "", "seconds": 1.0}),
    ]
    return sorted(lines, key=lambda line: line[0])


def facts_of(
    *paths: Path,
    run: str = "s3://bucket/run",
    stored: Iterable[StoredCheckpoint] = (),
    price: float | None = None,
) -> RunFacts:
    return gather_facts(run, read_logs(paths), tuple(stored), dollars_per_hour=price)


def page_of(facts: RunFacts) -> str:
    return report_page(facts, made_at_unix=T0).decode()
