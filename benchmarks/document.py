"""Tables and pictures of docs/performance.md, between markers, from the committed JSON: no figure is typed by hand.

<!-- measured: makespan -->      tables of one experiment, and the command
<!-- measured: makespan 0 -->    one of its tables
<!-- measured: targets -->       the figures to reach
<!-- measured: machine -->       where all this was measured
<!-- drawn: makespan intervals -->    pictures, those whose experiment was measured
… <!-- end -->
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import drawing, results, targets
from benchmarks.experiments import EXPERIMENTS, experiment

__all__ = ["PAGE", "adopt", "fill", "filled"]

PAGE = results.COMMITTED.parents[1] / "performance.md"
_MARKED = re.compile(
    r"(<!-- (?P<kind>measured|drawn): (?P<what>[a-z0-9 ]+) -->\n).*?(<!-- end -->)", re.DOTALL
)


def adopt(source: Path = results.RESULTS, into: Path = results.COMMITTED) -> list[Path]:
    """Take the newest results of each experiment to where they are committed."""
    into.mkdir(parents=True, exist_ok=True)
    taken = []
    for name in EXPERIMENTS:
        path = source / f"{name}.json"
        if path.exists():
            taken.append(Path(shutil.copyfile(path, into / path.name)))
    return taken


def filled(text: str, documents: Mapping[str, dict[str, Any] | None]) -> str:
    """The page with everything between markers made anew.

    Raises:
        ValueError: A marker names no experiment, or no picture.
    """

    def fill_in(match: re.Match[str]) -> str:
        made = (_pictures if match["kind"] == "drawn" else _block)(match["what"], documents)
        return f"{match[1]}{made}\n{match[4]}" if made else f"{match[1]}{match[4]}"

    return _MARKED.sub(fill_in, text)


def fill(page: Path = PAGE) -> Path:
    """Fill the page in place."""
    documents = {name: results.read(name) for name in EXPERIMENTS}
    page.write_text(filled(page.read_text(encoding="utf-8"), documents), encoding="utf-8")
    return page


def _block(what: str, documents: Mapping[str, dict[str, Any] | None]) -> str:
    name, *place = what.split()
    if name == "targets":
        return targets.grid(documents).markdown()
    if name == "machine":
        return _machine(documents)
    if name not in EXPERIMENTS:
        raise ValueError(
            f"the page asks for {what!r}; there are {', '.join(EXPERIMENTS)}, targets and machine"
        )
    document = documents.get(name)
    if document is None:
        return f"Not measured: `python -m benchmarks {name}`."
    grids = experiment(name).grids(document)
    chosen = [grids[int(number)] for number in place] if place else grids
    tables = "\n\n".join(grid.markdown() for grid in chosen)
    return f"{tables}\n\n`{document['command']}`{_elsewhere(document, documents)}{_stolen(document)}"


def _elsewhere(document: dict[str, Any], documents: Mapping[str, dict[str, Any] | None]) -> str:
    """What is to be known of a table that was not measured on the machine that the page names."""
    here = _named(documents)
    processor = document["machine"]["processor"]
    return f" on {processor}" if here is not None and here["machine"]["processor"] != processor else ""


def _stolen(document: dict[str, Any]) -> str:
    """How much of the cores was not ours while this was measured."""
    share = document.get("stolen_share")  # what was measured before it was counted has none
    return "" if share is None else f", {100 * share:.1f} % of the cores' time stolen by the host"


def _named(documents: Mapping[str, dict[str, Any] | None]) -> dict[str, Any] | None:
    """The one whose machine the page names."""
    return next((of for of in documents.values() if of is not None), None)


def _pictures(what: str, documents: Mapping[str, dict[str, Any] | None]) -> str:
    lines = []
    for name in what.split():
        if name not in drawing.PICTURES:
            raise ValueError(
                f"the page asks for the picture {name!r}; there are {', '.join(drawing.PICTURES)}"
            )
        measured_by, title, _ = drawing.PICTURES[name]
        if documents.get(measured_by) is not None:
            lines.append(f"![{title}](figures/{name}.svg)")
    return "\n".join(lines)


def _machine(documents: Mapping[str, dict[str, Any] | None]) -> str:
    document = _named(documents)
    if document is None:
        return "Nothing was measured yet."
    machine = document["machine"]
    versions = machine["versions"]
    return (
        f"{machine['cores']} cores ({machine['processor']}), {machine['memory_bytes'] / (1 << 30):.0f} GiB of memory, "
        f"a local virtual disk ({machine['file_system']}), no GPU; Linux {machine['kernel']}, Python "
        f"{machine['python']}, torch {versions['torch']}, Open MPI {versions['openmpi']}."
    )
