"""The demo's output: a bar for each phase, the facts, the table; and `result.json` for programs.

On a terminal the bars move; elsewhere (a log, CI) each phase leaves a few plain lines.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from examples.demo.story import Outcome, Played

__all__ = ["Display", "figures", "show"]


class Bar(Protocol):
    """Progress of one phase."""

    def at(self, done: int, note: str) -> None:
        """Show that `done` steps are done."""
        ...


class Display:
    """Shows phases. A context manager that owns the terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:14}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print one line between phases."""
        self._console.print(text)

    @contextmanager
    def phase(self, title: str, total: int) -> Iterator[Bar]:
        """Show one phase of `total` steps while the block runs."""
        if self._console.is_terminal:
            task = self._progress.add_task(title, total=total, note="starting")
            yield _MovingBar(self._progress, task)
            self._progress.stop_task(task)
        else:
            yield _LineLog(self._console, title, total)


class _MovingBar:
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def at(self, done: int, note: str) -> None:
        self._progress.update(self._task, completed=done, note=note)


class _LineLog:
    """Prints a line at the start, after each fifth of the phase, and for notes that are not about a loss."""

    def __init__(self, console: Console, title: str, total: int) -> None:
        self._console, self._title, self._total = console, title, total
        self._next = 0
        self._console.print(f"{title}: starting")

    def at(self, done: int, note: str) -> None:
        if done >= self._next or not note.startswith("loss"):
            self._console.print(f"{self._title}: {done}/{self._total} {note}", soft_wrap=True)
            self._next = done + max(1, self._total // 5)


def figures(outcome: Outcome) -> dict[str, Any]:
    """Return the figures for the table and for result.json; None where a figure is unknown."""
    plan, killed, resumed = outcome.plan, outcome.killed, outcome.resumed
    manifests = sorted(outcome.watch.seen.values(), key=lambda manifest: manifest.order)
    restored = [line for line in _events(resumed) if line["event"] == "restore"]
    return {
        "ranks": plan.ranks,
        "steps": plan.steps,
        "checkpoint_every": plan.every,
        "killed_after_step": killed.steps[-1].step,
        "resumed_from_step": resumed.steps[0].step - 1,
        "published": len(manifests),
        "image_bytes": max((manifest.image_bytes for manifest in manifests), default=None),
        "step_seconds": {
            "without_checkpoints": statistics.median(step.seconds for step in outcome.reference.steps),
            "with_checkpoints": statistics.median(step.seconds for step in killed.steps + resumed.steps),
        },
        "cst_seconds": _spread(_stalls(_events(killed)) + _stalls(_events(resumed))),
        "pgt1_seconds": _spread([manifest.pgt1_seconds for manifest in manifests]),
        "pgt2_seconds": _spread([manifest.pgt2_seconds for manifest in manifests]),
        "restore_seconds": max((sum(line["seconds"].values()) for line in restored), default=None),
    }


def show(console: Console, outcome: Outcome, path: Path) -> bool:
    """Print facts and table, and write result.json to `path`. Returns whether every fact holds."""
    numbers = figures(outcome)
    for fact in outcome.checks:
        mark = "[green]pass[/]" if fact.holds else "[red]FAIL[/]"
        console.print(f"  {mark}  {fact.claim}", highlight=False, soft_wrap=True)
        if not fact.holds:
            console.print(f"        {fact.wrong}", highlight=False, soft_wrap=True, markup=False)
    console.print(_table(numbers))
    passed = all(fact.holds for fact in outcome.checks)
    facts = [{"claim": fact.claim, "holds": fact.holds, "wrong": fact.wrong} for fact in outcome.checks]
    path.write_text(
        json.dumps({"passed": passed, "checks": facts, "figures": numbers}, indent=2) + "\n", encoding="utf-8"
    )
    return passed


def _table(numbers: dict[str, Any]) -> Table:
    table = Table(title="holdfast demo", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    per_step = numbers["step_seconds"]
    image = numbers["image_bytes"]
    table.add_row("training ranks", str(numbers["ranks"]))
    table.add_row("steps", str(numbers["steps"]))
    table.add_row("killed after step", str(numbers["killed_after_step"]))
    table.add_row("resumed from step", str(numbers["resumed_from_step"]))
    table.add_row(
        "checkpoints published", f"{numbers['published']}, every {numbers['checkpoint_every']} steps"
    )
    table.add_row("image", "-" if image is None else f"{image:,} bytes")
    table.add_row(
        "step, median",
        f"{per_step['with_checkpoints']:.3f} s (reference {per_step['without_checkpoints']:.3f} s)",
    )
    table.add_row("training stalled by one, median / max", _seconds(numbers["cst_seconds"]))
    table.add_row("until safe on the stager, median / max", _seconds(numbers["pgt1_seconds"]))
    table.add_row("until durable in the store, median / max", _seconds(numbers["pgt2_seconds"]))
    restore = numbers["restore_seconds"]
    table.add_row("restore", "-" if restore is None else f"{restore:.3f} s")
    return table


def _seconds(spread: dict[str, float] | None) -> str:
    return "-" if spread is None else f"{spread['median']:.3f} / {spread['max']:.3f} s"


def _spread(values: list[float]) -> dict[str, float] | None:
    return {"median": statistics.median(values), "max": max(values)} if values else None


def _events(played: Played) -> list[dict[str, Any]]:
    if played.events is None or not played.events.exists():
        return []
    # A killed rank may have left half a line.
    whole = [
        line
        for line in played.events.read_text(encoding="utf-8").splitlines(keepends=True)
        if line.endswith("\n")
    ]
    return [json.loads(line) for line in whole]


def _stalls(events: list[dict[str, Any]]) -> list[float]:
    """Return the stall of each save: the longest of any rank, as the others wait for that rank."""
    longest: dict[int, float] = {}
    for line in events:
        if line["event"] == "save" and line["role"] == "trainer" and "cst_seconds" in line:
            longest[line["step"]] = max(longest.get(line["step"], 0.0), float(line["cst_seconds"]))
    return list(longest.values())
