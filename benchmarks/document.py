"""Tables and pictures of docs/performance.md and docs/papers.md, between markers, from the committed JSON.

No figure is typed by hand.

<!-- measured: makespan -->      tables of one experiment and their source: command, date, commit, machine
<!-- measured: makespan 0 -->    one of its tables
<!-- measured: papers -->        the papers' results, each beside the measured one
<!-- measured: targets -->       the figures to reach, a table for each machine
<!-- drawn: makespan resnet -->  pictures, those whose experiment was measured
… <!-- end -->

Figures under one heading come from one machine: a page that mixes two is refused.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import drawing, machine, papers, results, targets
from benchmarks.behind import behind
from benchmarks.experiments import EXPERIMENTS, experiment

__all__ = ["PAGES", "adopt", "fill", "filled"]

PAGES = tuple(results.COMMITTED.parents[1] / name for name in ("performance.md", "papers.md"))
_MARKED = re.compile(
    r"(<!-- (?P<kind>measured|drawn): (?P<what>[a-z0-9 -]+) -->\n).*?(<!-- end -->)", re.DOTALL
)


def adopt(source: Path = results.RESULTS, into: Path = results.COMMITTED) -> list[Path]:
    """Copy the newest results of each experiment to the folder of committed figures."""
    into.mkdir(parents=True, exist_ok=True)
    taken = []
    for name in EXPERIMENTS:
        path = source / f"{name}.json"
        if path.exists():
            taken.append(Path(shutil.copyfile(path, into / path.name)))
    return taken


def filled(text: str, documents: Mapping[str, dict[str, Any] | None]) -> str:
    """Return the page with the text between markers replaced, made from `documents`.

    Raises:
        ValueError: A marker names no experiment or picture, or figures under one heading come from two machines.
    """
    _require_one_machine_each(text, documents)

    tabled = {match["what"].split()[0] for match in _MARKED.finditer(text) if match["kind"] == "measured"}

    def fill_in(match: re.Match[str]) -> str:
        what = match["what"]
        made = _pictures(what, documents, tabled) if match["kind"] == "drawn" else _block(what, documents)
        return f"{match[1]}{made}\n{match[4]}" if made else f"{match[1]}{match[4]}"

    return _MARKED.sub(fill_in, text)


def fill(pages: Sequence[Path] = PAGES) -> Sequence[Path]:
    """Fill the pages in place."""
    documents = {name: results.read(name) for name in EXPERIMENTS}
    for page in pages:
        page.write_text(filled(page.read_text(encoding="utf-8"), documents), encoding="utf-8")
    return pages


def _require_one_machine_each(text: str, documents: Mapping[str, dict[str, Any] | None]) -> None:
    for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        machines: dict[str, list[str]] = {}
        for match in _MARKED.finditer(section):
            for name in _experiments(match["kind"], match["what"]):
                document = documents.get(name)
                if document is not None:
                    machines.setdefault(machine.named(document["machine"]), []).append(name)
        if len(machines) > 1:
            found = "; ".join(f"{where}: {', '.join(names)}" for where, names in machines.items())
            heading = section.partition("\n")[0]
            raise ValueError(
                f"{heading!r}: expected figures of one machine, got {found}. Measure them on one machine, or give each "
                "a heading"
            )


def _experiments(kind: str, what: str) -> list[str]:
    """Return the experiments of a marker; none for `targets` and `papers`, which read all documents."""
    if kind == "drawn":
        return list(
            dict.fromkeys(drawing.PICTURES[name][0] for name in what.split() if name in drawing.PICTURES)
        )
    return [name for name in what.split()[:1] if name in EXPERIMENTS]


def _block(what: str, documents: Mapping[str, dict[str, Any] | None]) -> str:
    name, *place = what.split()
    if name == "targets":
        return _targets(documents)
    if name == "papers":
        grid = papers.grid(documents)
        return "\n\n".join(filter(None, (grid.markdown(), papers.shortfalls(grid))))
    if name not in EXPERIMENTS:
        raise ValueError(
            f"the page asks for {what!r}; there are {', '.join(EXPERIMENTS)}, targets and papers"
        )
    document = documents.get(name)
    if document is None:
        return f"Not measured: `python -m benchmarks {name}`."
    grids = experiment(name).grids(document)
    chosen = [grids[int(number)] for number in place] if place else grids
    tables = "\n\n".join(grid.markdown() for grid in chosen)
    return "\n\n".join(filter(None, (tables, behind(document), _source(document))))


def _targets(documents: Mapping[str, dict[str, Any] | None]) -> str:
    """Return a table for each machine; the machine with the newest figures comes first."""
    there = {name: document for name, document in documents.items() if document is not None}
    by_machine: dict[str, dict[str, dict[str, Any]]] = {}
    for name, document in sorted(there.items(), key=lambda of: _dated(of[1])["date"], reverse=True):
        by_machine.setdefault(machine.named(document["machine"]), {})[name] = document
    blocks = []
    for where, chosen in by_machine.items():
        grid = targets.grid(chosen, where=where)
        if grid.rows:
            judged = {target.experiment for target in targets.TARGETS}
            sources = "; ".join(f"`{name}` {_when(of)}" for name, of in chosen.items() if name in judged)
            blocks.append(f"{grid.markdown()}\n\n{sources}")
    missing = sorted({target.experiment for target in targets.TARGETS} - set(there))
    if missing:
        blocks.append(f"Not measured: {', '.join(missing)}.")
    return "\n\n".join(blocks)


def _source(document: dict[str, Any]) -> str:
    """Return the source line of a table or picture."""
    share = document.get("stolen_share")  # older documents have no such count
    stolen = "" if share is None else f"; {100 * share:.1f} % of the cores' time stolen by the host"
    return f"`{document['command']}`, {_when(document)}; {machine.named(document['machine'])}{stolen}"


def _dated(document: dict[str, Any]) -> dict[str, str]:
    """Return date and commit; for a JSON that names neither, `recorded` has those of the commit that added it."""
    return dict(document.get("measured") or document["recorded"])


def _when(document: dict[str, Any]) -> str:
    of = _dated(document)
    way = f"measured {of['date']} at" if "measured" in document else f"recorded {of['date']} in"
    return f"{way} {of['commit']}"


def _pictures(what: str, documents: Mapping[str, dict[str, Any] | None], tabled: set[str]) -> str:
    """Pictures; those whose experiment has a table on the page leave to it what is said below."""
    lines = []
    for name in what.split():
        if name not in drawing.PICTURES:
            raise ValueError(
                f"the page asks for the picture {name!r}; there are {', '.join(drawing.PICTURES)}"
            )
        measured_by, title, _ = drawing.PICTURES[name]
        if documents.get(measured_by) is not None:
            lines.append(f"![{title}](figures/{name}.svg)")
    found = [documents.get(name) for name in _experiments("drawn", what) if name not in tabled]
    below = [text for of in found if of is not None for text in (behind(of), _source(of)) if text]
    return "\n\n".join(["\n".join(lines), *below])
