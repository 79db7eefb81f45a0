"""Generates docs/hosts.md from the results of tests/hosts/times.py: `python -m tests.hosts.table`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.hosts.times import PHASES, RESULTS
from tests.support.job import REPOSITORY

__all__ = ["PAGE", "render"]

PAGE = REPOSITORY / "docs" / "hosts.md"

_HEAD = """\
# Whole hosts are lost

`python -m tests.hosts.table` makes this page from the results of `make hosts`; the code is in `tests/hosts/`. All
hosts run on one machine, each as a set of namespaces with its own address, processes, memory, disk, metadata service
and sshd; tbf limits the links. `holdfast run` on the stager's host starts mpirun, which starts the ranks over ssh.
The store is OpenStack Swift's S3 on the same network. To kill a host, the test cuts its link and then kills its
processes, so no connection is closed; an empty host replaces it.

Afterwards the steps that count took each sample exactly once, and no process, ring, segment or upload is left. With
as many ranks as before, samples and final state are bit-identical to an undisturbed run.

Seconds after the loss at which each phase was reached:

| story | ranks | {phases} | steps done again |
|---|---|{rules}---|
"""

_TAIL = """
*lost*: the supervisor has noticed. *ended*: mpirun has ended. *launched*: mpirun was started again. *joined*: ranks and
stager have joined. *restored*: every rank has its state. *training*: every rank has done a step. The restart of the
stager's host ends the supervisor too, so its first phases are empty, and *launched* is the same command given again.
"""


def render(results: Sequence[dict[str, Any]]) -> str:
    """Return the page."""
    lines = [_HEAD.format(phases=" | ".join(PHASES), rules="---|" * len(PHASES)).rstrip("\n")]
    for result in results:
        at = result["at_seconds"]
        cells = [f"{at[phase]:.1f}" if phase in at else "" for phase in PHASES]
        ranks = " → ".join(map(str, result["ranks"]))
        lines.append(
            f"| {result['scenario']} | {ranks} | {' | '.join(cells)} | {result['steps_done_again']} |"
        )
    lines.append(_TAIL)
    first = results[0]
    loads = sorted(result["load"] for result in results)
    gib = first["memory_bytes"] / (1 << 30)
    lines += [
        f"All hosts share {first['cpus']} cores and {gib:.0f} GiB of memory with everything else on this machine,",
        f"whose load was {loads[0]:g} to {loads[-1]:g}. These are times of a busy machine, not of a cluster: only",
        f"compare the phases with each other. The links have {first['rate']}. The supervisor looks at the hosts",
        "every 5 s; a rank counts as silent after 10 s, and as lost 2 s later.",
    ]
    return "\n".join(lines) + "\n"


def _read(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]


def _main() -> None:
    results = _read(RESULTS)
    assert results, f"nothing in {RESULTS}: run `make hosts`"
    PAGE.write_text(render(results))
    print(PAGE)


if __name__ == "__main__":
    _main()
