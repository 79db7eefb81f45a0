"""Generates docs/kill-matrix.md from the results of tests/chaos/results.py: `python -m tests.chaos.table`.

Rows are stages, columns victims; a cell shows how often each of its variants was run, and how often it passed. The page
has parts, each with its commit and machine. A part without new results stays as it is on the page, with its own commit
and machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.chaos.cells import (
    CELLS,
    DOUBT_CELLS,
    GROWTH_CELLS,
    MOMENTS,
    OUTAGE_CELLS,
    PROOF_CELLS,
    READING_CELLS,
    SPLIT_CELLS,
    STAGES,
    TCP_CELLS,
    TORN_CELLS,
    VICTIMS,
    Cell,
    Stage,
)
from tests.chaos.cut_off import CUT_CELLS
from tests.chaos.freezing import ELSEWHERE_CELLS, FREEZE_CELLS
from tests.chaos.restarted_stagers import RESTART_CELLS
from tests.chaos.results import RESULTS, Result, read
from tests.chaos.share_cells import ALL_SHARE_CELLS
from tests.chaos.share_scenario import RANK_SHARE_CELLS
from tests.chaos.wrappers import WRAPPER_CELLS
from tests.support.job import REPOSITORY

__all__ = ["GRIDS", "PAGE", "named_cells", "render"]

PAGE = REPOSITORY / "docs" / "kill-matrix.md"
_ENTRY = re.compile(r"(?:(S3|without ULFM|elsewhere) )?(\d+)/(\d+)")

_HEAD = """\
# The kill matrix

`python -m tests.chaos.table` makes this page from what `make chaos` ran; the code is `tests/chaos/`. Each cell is a
real job under mpirun, with two training ranks and a stager. The victims get SIGKILL at the named point, in the second
of three checkpoints or in the first of a relaunched job; the rest of the job ends by itself, and the same command is
started again. A run holds if

- every checkpoint that was staged at the kill or later is in the store and verified (*the machine*: every durable one),
  unless retention removed it, and the job resumed from the newest or later;
- the catalog never lists one that was not staged or is damaged, and at the end the store has no other file and no
  open upload;
- no process, ring, socket, journal or shared-memory segment is left;
- losses, samples, published files and final state are bit-identical to a run without a kill.

`2/2`: two runs with `mpirun --with-ft ulfm` on a directory, both held. *S3*: on OpenStack Swift's S3.
*Elsewhere*: relaunched on another machine. *Everything*: all processes, but the ring survives; *the machine*: the
ring is lost too. `0/0`: not run.
"""

_TORN_HEAD = """\
## Torn copies

A tensor of rank 0 is changed during its copy, in the second of three checkpoints, after rank 1 has sent its slice and
is killed. The step is withdrawn as torn, never staged, and saved by the relaunched job.
"""

_DOUBT_HEAD = """\
## Doubtful copies

The second checkpoint is torn without a sign and published. Then a comparison of rank 0 finds such a change, and the
victims are killed when the stager has heard the doubt, has written it, or the manifest is marked. In the end that
checkpoint is doubtful, no other is without reason, and the job has resumed from the newest of the others.
"""

_SPLIT_HEAD = """\
## Split state

The same for a model that FSDP2 has split unevenly. Each published file, opened by plain `torch.load`, is
bit-identical to the whole tensors that torch gathered (`full_tensor()`) before that save.
"""

_TCP_HEAD = """\
## Over TCP

The same under torchrun with a standing stager, and a new one of each for the relaunch. A rank has one second to
reconnect.
"""

_READING_HEAD = """\
## Reading the ring

A job is killed when its second checkpoint is staged. The next one restores from the ring, and the victims are killed
when rank 1 has seen what a slot holds and has copied nothing (`rank:1@ring_seen`). The restored job is started again.
"""

_GROWTH_HEAD = """\
## A ring that grows

Two checkpoints of 31 chunks do not fit, so the ring grows. *Memory taken*: the ring's file is longer
(`flusher@ring_taken`). *Slots in the journal*: the stager was not told (`flusher@ring_added`). *Stager told*: it has
mapped none (`stager@growth_heard`). *Nobody*: that process is stopped (SIGSTOP) until the next save.
"""

_OUTAGE_HEAD = """\
## A store that refuses

The disk is full until the victims are dead. *Staged*: the second checkpoint is whole in the ring, and no upload has
begun (`stager@staged`). *An older one makes room*: the third has no room, so the first is dropped
(`flusher@superseded`), and only it may be missing.
"""

_PROOF_HEAD = """\
## Proofs

The second checkpoint is published, and its proof is not (`flusher@proof_heard`). The relaunched job is exact, and its
resume is verified or not proven. In no cell of this page does a resume differ.
"""

_SHARES_HEAD = """\
## Several stagers, one file

Two flushers, each on a machine of its own, write a step together; stagers are played by hand. The victims are killed at
the named moment, and a *node* loses its ring, too. Then the next job saves one more step, with two stagers or one; *at
once*: its flusher takes over a ring of two stagers. *Frozen*: the victims stand still until that job has ended, wake,
and change nothing published. Each listed file has the bytes that one stager writes. A step that all had staged is
published, unless a node is lost before its share is sealed: then it is named as lost, and never listed.
"""

_RANK_SHARES_HEAD = """\
## Several stagers, with ranks

The same with real stagers and two ranks under torchrun, checked as in the matrix: training goes on to the last bit.
*Has not told*: all shares are staged, and one stager has not said so to the ranks.
"""

_RESTART_HEAD = """\
## Several stagers, started again

A stager is killed before the ranks know that its share of the second checkpoint is staged, and started again at its
address. The job goes on as the same attempt: the ranks send the share again, and every checkpoint becomes durable.
"""

_WRAPPER_HEAD = """\
## Wrappers that are killed

The process that started a rank gets SIGKILL under `holdfast drill --with wrapper`, as when a container is killed.
`holdfast run` counts the attempt as killed and restarts the job, which resumes bit for bit. The report names the
death.
"""

_REPLACED_HEAD = """\
## Writers that are replaced

A flusher is stopped (SIGSTOP) between its check of the claim and its n-th visible act, or cut off from S3 at an act.
Another host takes over, saves the same steps and reads them back. Then the first one continues. It ends as replaced,
all objects of the other attempt are unchanged, and a third flusher removes only the first one's leftovers.

Acts are, for three steps, file, manifest and verdict; then retention removes a manifest and a file. A torn step is
never published. Doubts are marked by the third flusher, not by the replaced one.
"""


_ELSEWHERE_HEAD = """\
## Writers that are replaced, on stores that promise less

On a directory with NFS semantics: every second answer to a link, rename or removal is lost, every fifth open has a
stale handle, and listings are late. And through fsspec, as a cloud without its own driver.
"""


class Grid(NamedTuple):
    """A part of the page beside the matrix: its text, and the name of the cell at each row and column."""

    head: str
    corner: str
    cells: dict[tuple[str, str], str]

    @property
    def heading(self) -> str:
        """Its first line."""
        return self.head.partition("\n")[0]

    def render(self, results: Sequence[Result], before: str) -> str:
        """The part of the page; `before` if it has no results."""
        counts = _Counts.of(results, self.cells.values())
        if before and not counts.runs:
            return before
        columns = list(dict.fromkeys(column for _, column in self.cells))
        lines = [
            self.head,
            f"| {self.corner} | {' | '.join(columns)} |",
            "|---" * (len(columns) + 1) + "|",
        ]
        for row in dict.fromkeys(row for row, _ in self.cells):
            names = [self.cells.get((row, column)) for column in columns]
            lines.append(f"| {row} | {' | '.join(counts.entry(name) if name else '' for name in names)} |")
        return "\n".join([*lines, "", *counts.footer(len(self.cells))])


class _Counts(NamedTuple):
    runs: list[Result]
    ran: Counter[str]
    held: Counter[str]

    @classmethod
    def of(cls, results: Iterable[Result], names: Iterable[str]) -> _Counts:
        known = set(names)
        runs = [result for result in results if result.cell in known]
        held = Counter(result.cell for result in runs if result.passed)
        return cls(runs, Counter(result.cell for result in runs), held)

    def entry(self, name: str) -> str:
        return f"{self.held[name]}/{self.ran[name]}"

    def footer(self, cells: int) -> list[str]:
        seconds = sum(result.seconds for result in self.runs) / max(1, len(self.runs))
        commits = sorted({result.commit for result in self.runs if result.commit})
        at = f" at {' and '.join(f'`{commit}`' for commit in commits)}" if commits else ""
        held = sum(self.held.values())
        return [
            f"{cells} cells; {len(self.runs)} runs{at}, {held} held; {seconds:.1f} s each on {os.cpu_count()} cores",
            f"({platform.machine()}), {_memory_gib():.0f} GiB of memory.",
            "",
        ]


def _row(cell: Cell) -> str:
    return f"{cell.stage.name}, TCP" if cell.tcp else cell.stage.name


GRIDS = (
    Grid(_TORN_HEAD, "moment", {(cell.stage.name, cell.victims.name): cell.name for cell in TORN_CELLS}),
    Grid(_DOUBT_HEAD, "moment", {(_row(cell), cell.victims.name): cell.name for cell in DOUBT_CELLS}),
    Grid(
        _SPLIT_HEAD,
        "moment",
        {(f"{cell.stage.name}, split", cell.victims.name): cell.name for cell in SPLIT_CELLS},
    ),
    Grid(
        _TCP_HEAD,
        "moment",
        {(f"{cell.stage.name}, TCP", cell.victims.name): cell.name for cell in TCP_CELLS},
    ),
    Grid(_READING_HEAD, "moment", {(_row(cell), cell.victims.name): cell.name for cell in READING_CELLS}),
    Grid(_GROWTH_HEAD, "moment", {(_row(cell), cell.victims.name): cell.name for cell in GROWTH_CELLS}),
    Grid(_OUTAGE_HEAD, "moment", {(_row(cell), cell.victims.name): cell.name for cell in OUTAGE_CELLS}),
    Grid(_PROOF_HEAD, "moment", {(cell.stage.name, cell.victims.name): cell.name for cell in PROOF_CELLS}),
    Grid(_SHARES_HEAD, "moment", {(cell.row, cell.victims.name): cell.name for cell in ALL_SHARE_CELLS}),
    Grid(_RANK_SHARES_HEAD, "moment", {(cell.row, cell.who): cell.name for cell in RANK_SHARE_CELLS}),
    Grid(_RESTART_HEAD, "moment", {(cell.moment, cell.who): cell.name for cell in RESTART_CELLS}),
    Grid(_WRAPPER_HEAD, "wrapper", {(cell.wrapper, "SIGKILL"): cell.name for cell in WRAPPER_CELLS}),
    Grid(
        _REPLACED_HEAD,
        "act",
        {(cell.act, cell.store): cell.name for cell in FREEZE_CELLS}
        | {(cell.act, cell.store): cell.name for cell in CUT_CELLS},
    ),
    Grid(_ELSEWHERE_HEAD, "act", {(cell.act, cell.store): cell.name for cell in ELSEWHERE_CELLS}),
)


def render(results: Iterable[Result], before: str = "") -> str:
    """Return the page.

    Args:
        results: All results.
        before: The page so far, for parts without results.
    """
    results = list(results)
    first, *parts = before.split("\n\n## ")
    kept = {"## " + part.partition("\n")[0]: f"## {part.rstrip()}\n" for part in parts}
    return "\n".join(
        [
            _matrix(results, f"{first.rstrip()}\n" if first else ""),
            *(grid.render(results, kept.get(grid.heading, "")) for grid in GRIDS),
        ]
    )


def _matrix(results: Sequence[Result], before: str) -> str:
    counts = _Counts.of(results, (cell.name for cell in CELLS))
    if before and not counts.runs:
        return before
    lines = [_HEAD]
    lines += _table("stage", STAGES, counts)
    lines += ["", "Killed at further points, by who reaches them and by everything at once:", ""]
    lines += _table("moment", MOMENTS, counts)
    lines += [
        "",
        *counts.footer(len(CELLS)),
    ]
    return "\n".join(lines)


def named_cells(page: str) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Read a page: (stage, victims, variant) → runs that passed, and all runs."""
    found: dict[tuple[str, str, str], tuple[int, int]] = {}
    columns: list[str] = []
    for line in page.splitlines():
        parts = [part.strip() for part in line.strip("|").split("|")]
        if line.startswith(("| stage |", "| moment |", "| wrapper |", "| act |")):
            columns = parts[1:]
        elif line.startswith("| ") and len(parts) == len(columns) + 1:
            for victims, entry in zip(columns, parts[1:], strict=True):
                for how, held, ran in _ENTRY.findall(entry):
                    found[parts[0], victims, how] = int(held), int(ran)
    return found


def _table(corner: str, stages: Sequence[Stage], counts: _Counts) -> list[str]:
    names = {stage.name for stage in stages}
    columns = [v.name for v in VICTIMS if any(c.stage.name in names and c.victims is v for c in CELLS)]
    lines = [f"| {corner} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for stage in stages:
        entries = [
            "<br>".join(
                f"{cell.how} {counts.entry(cell.name)}".strip()
                for cell in CELLS
                if cell.stage is stage and cell.victims.name == column
            )
            for column in columns
        ]
        lines.append(f"| {stage.name} | {' | '.join(entries)} |")
    return lines


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    before = arguments.page.read_text() if arguments.page.exists() else ""
    arguments.page.write_text(render(read(arguments.results), before))
    print(arguments.page)


if __name__ == "__main__":
    _main()
