"""From samples to figures: medians, ratios made within one round, their spread, tables and JSON.

A ratio says how many times longer the peer takes than holdfast: 2.0 is twice as long. It is made in every
round by itself; what is stated is the median of these ratios with the least and the greatest.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["Spread", "expectations", "ratios", "render", "round_figures", "spread", "summarise", "write"]

_RAW = ("raw_mpi", "raw_direct")
_FASTER_THAN_TORCH_SAVE_MIN = 2.0
_IDLE_PERCENT_MAX = 2.0


@dataclass(frozen=True)
class Spread:
    """Median of some rounds, with the least and the greatest."""

    median: float
    least: float
    greatest: float

    def text(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} ({self.least:.{digits}f}–{self.greatest:.{digits}f})"


def spread(values: Sequence[float]) -> Spread:
    """Median, least and greatest of `values`.

    Raises:
        ValueError: There are none.
    """
    if not values:
        raise ValueError("no rounds were measured")
    return Spread(statistics.median(values), min(values), max(values))


def ratios(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Spread of `over[i] / under[i]`: rounds are compared with themselves, never with another one.

    Raises:
        ValueError: The two have different numbers of rounds, or a divisor is 0.
    """
    if len(over) != len(under):
        raise ValueError(f"{len(over)} rounds cannot be compared with {len(under)}")
    if 0 in under:
        raise ValueError("a round of the divisor took no time at all")
    return spread([a / b for a, b in zip(over, under, strict=True)])


def round_figures(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """One checkpoint's figures from what its ranks saw.

    The job stalls as long as its most-stalled rank; it began when the first rank began, and a moment is
    reached when the last rank has reached it.

    Returns:
        `stall_seconds`, `done_seconds`, and `<mark>_seconds` for each mark that all ranks have.
    """
    start = min(sample["start"] for sample in samples)
    figures = {
        "stall_seconds": max(sample["stall_seconds"] for sample in samples),
        "done_seconds": max(sample["end"] for sample in samples) - start,
    }
    shared = set.intersection(*(set(sample.get("marks", {})) for sample in samples))
    for mark in sorted(shared):
        figures[f"{mark}_seconds"] = max(sample["marks"][mark] for sample in samples) - start
    return figures


def summarise(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Medians, spreads and ratios over all rounds.

    Args:
        rounds: One mapping per round: peer → its figures. Every round has the same peers.
    """
    columns: dict[str, dict[str, list[float]]] = {}
    for figures in rounds:
        for peer, values in figures.items():
            for name, value in values.items():
                columns.setdefault(peer, {}).setdefault(name, []).append(value)
    result: dict[str, Any] = {
        "peers": {
            peer: {name: spread(values) for name, values in of.items()} for peer, of in columns.items()
        },
        "ratios": {},
    }
    ours = columns.get("holdfast")
    if ours is None:
        return result
    for peer, of in columns.items():
        if peer == "holdfast" or peer in _RAW:
            continue
        result["ratios"][f"durable: {peer} / holdfast"] = ratios(of["done_seconds"], ours["done_seconds"])
        result["ratios"][f"stall: {peer} / holdfast"] = ratios(of["stall_seconds"], ours["stall_seconds"])
    if "raw_mpi" in columns:
        result["ratios"]["staged: holdfast / raw MPI"] = ratios(
            ours["staged_seconds"], columns["raw_mpi"]["done_seconds"]
        )
    if "raw_direct" in columns:
        direct = columns["raw_direct"]["done_seconds"]
        result["ratios"]["durable: holdfast / raw O_DIRECT"] = ratios(ours["done_seconds"], direct)
    return result


def expectations(
    summary: Mapping[str, Any], idle_cpu_percent: Mapping[str, float]
) -> list[dict[str, str | bool]]:
    """What holdfast promises of these figures, and whether it held: `{"what", "got", "held"}` each."""
    result: list[dict[str, str | bool]] = []
    ratio: Spread | None = summary["ratios"].get("durable: torch.save+fsync / holdfast")
    if ratio is not None:
        result.append(
            {
                "what": f"durable at least {_FASTER_THAN_TORCH_SAVE_MIN:.0f} times as fast as torch.save+fsync",
                "got": f"{ratio.text()} times",
                "held": ratio.median >= _FASTER_THAN_TORCH_SAVE_MIN,
            }
        )
    for process in ("stager", "flusher"):
        if process in idle_cpu_percent:
            percent = idle_cpu_percent[process]
            result.append(
                {
                    "what": f"idle {process} takes at most {_IDLE_PERCENT_MAX:.0f} % of a core",
                    "got": f"{percent:.2f} %",
                    "held": percent <= _IDLE_PERCENT_MAX,
                }
            )
    return result


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write `document` as JSON; a `Spread` becomes an object with its three numbers."""

    def plain(value: object) -> Any:
        if isinstance(value, Spread):
            return asdict(value)
        raise TypeError(f"{type(value).__name__} is not for JSON")

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2, default=plain) + "\n", encoding="utf-8")


# -- tables ------------------------------------------------------------------------------------------------


def render(document: Mapping[str, Any], console: Console) -> None:
    """Print the tables of one result document (see `benchmarks.schedule.run`)."""
    settings, summary = document["settings"], document["summary"]
    title = (
        f"{settings['image_bytes'] / 1e9:.2f} GB image, {settings['ranks']} ranks, "
        f"{settings['rounds']} rounds: seconds, median (least–greatest)"
    )
    console.print(_peer_table(title, summary, settings["image_bytes"]))
    console.print(_ratio_table(summary["ratios"]))
    console.print(_memory_table(document["memory"], document["idle_cpu_percent"], settings))
    for expected in document["expectations"]:
        held = "held" if expected["held"] else "NOT held"
        console.print(f"{held}: {expected['what']} ({expected['got']})", highlight=False)


def _peer_table(title: str, summary: Mapping[str, Any], image_bytes: int) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("peer", "stall (CST)", "staged (PGT-1)", "durable (PGT-2)", "GB/s"):
        table.add_column(name, justify="left" if name == "peer" else "right")
    for peer, of in summary["peers"].items():
        done: Spread = of["done_seconds"]
        raw_mpi = peer == "raw_mpi"
        staged = done if raw_mpi else of.get("staged_seconds")
        table.add_row(
            peer,
            of["stall_seconds"].text(3) if "stall_seconds" in of else "",
            staged.text(3) if staged else "",
            "" if raw_mpi else done.text(3),
            f"{image_bytes / 1e9 / done.median:.2f}",
        )
    return table


def _ratio_table(pairs: Mapping[str, Spread]) -> Table:
    table = Table(title="ratios, each made within one round: median (least–greatest)", title_justify="left")
    table.add_column("ratio")
    table.add_column("times", justify="right")
    for name, value in pairs.items():
        table.add_row(name, value.text())
    return table


def _memory_table(memory: Mapping[str, Any], idle: Mapping[str, float], settings: Mapping[str, Any]) -> Table:
    table = Table(title="memory in MB, and idle CPU in percent of one core", title_justify="left")
    for name in ("process", "resident", "own (USS)", "beyond the state", "at most", "idle CPU"):
        table.add_column(name, justify="left" if name == "process" else "right")

    def megabytes(value: float | None) -> str:
        return "" if value is None else f"{value / 1e6:.0f}"

    for process in ("stager", "flusher"):
        of = memory.get(process)
        if of:
            cpu = f"{idle[process]:.2f} %" if process in idle else ""
            table.add_row(process, megabytes(of["rss_bytes"]), megabytes(of["uss_bytes"]), "", "", cpu)
    table.add_row("ring (both map it)", megabytes(settings["ring_bytes"]), "", "", "", "")
    for peer, of in memory["ranks"].items():
        cpu = f"{idle['trainer']:.2f} %" if peer == "holdfast" and "trainer" in idle else ""
        table.add_row(
            f"rank with {peer}", "", "", megabytes(of["extra_bytes"]), megabytes(of["extra_peak_bytes"]), cpu
        )
    return table
