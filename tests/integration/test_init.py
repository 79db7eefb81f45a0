"""`holdfast init`: a plain script with the printed lines is killed, and resumes bit for bit."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.integration.jobs import plain_ddp
from tests.support.cluster import Cluster, load, same, wait_until
from tests.support.job import HOLDFAST

pytestmark = [pytest.mark.mpi]
SECONDS_MAX = 200.0
EVERY, STEPS = 3, 18
"""Six steps in each of three epochs: the step after the fourth checkpoint begins an epoch. The last step is saved, so
that a run of fast steps waits for it, however busy the machine is."""


def lines(cluster: Cluster, number: int) -> list[str]:
    path = cluster.out(number) / "losses-0"
    return path.read_text().splitlines() if path.exists() else []


def run(cluster: Cluster, *, kill_after: int = 0) -> list[str]:
    """One start; SIGKILL to both ranks after this many steps of it. Returns what rank 0 has logged of its steps."""
    number = cluster.started + 1
    cluster.out(number).mkdir(parents=True)
    with cluster.start(2, env={"STEP_SECONDS": "1" if kill_after else "0"}) as job:
        if not kill_after:
            job.succeed(SECONDS_MAX)
            return lines(cluster, number)
        wait_until(lambda: len(lines(cluster, number)) >= kill_after, SECONDS_MAX, job.output)
        for rank in range(2):
            os.kill(int((cluster.out(number) / f"pid-{rank}").read_text()), signal.SIGKILL)
        job.wait(SECONDS_MAX)
    assert len(lines(cluster, number)) < STEPS, "it was done before it was killed"
    return lines(cluster, number)


def with_lines(source: str, printed: str) -> str:
    """The script with each printed block at its place; the backend is the one for machines without GPUs."""
    blocks = dict(re.findall(r"^# (\(\d\)).*\n((?:(?!# \(|# on ).*\n)+)", printed, re.MULTILINE))
    assert list(blocks) == [f"({number})" for number in range(1, 10)], printed
    made = []
    for line in source.splitlines():
        place = re.search(r"# init (\(\d\))$", line)
        indent = line[: len(line) - len(line.lstrip())]
        made.append(line if place is None else textwrap.indent(blocks.pop(place[1]).rstrip(), indent))
    assert list(blocks) == ["(4)"], "of a loop over steps"
    return "\n".join(made).replace('("nccl")', '("gloo")') + "\n"


def test_a_script_with_the_printed_lines_resumes_bit_for_bit(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    shutil.copy(plain_ddp.__file__, script)
    printed = subprocess.run(
        [HOLDFAST, "init", "train.py", "--every", str(EVERY)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert script.read_bytes() == Path(plain_ddp.__file__).read_bytes(), "init writes nothing"
    script.write_text(with_lines(script.read_text(), printed))

    whole = Cluster(
        tmp_path / "whole", str(tmp_path / "whole" / "store"), {}, script=str(script), forked=True
    )
    reference = run(whole)
    assert len(reference) == STEPS

    killed = Cluster(
        tmp_path / "killed", str(tmp_path / "killed" / "store"), {}, script=str(script), forked=True
    )
    before = run(killed, kill_after=11)
    assert before == reference[: len(before)]
    rest = run(killed)  # from the middle of the second epoch on, past its end
    assert len(rest) == STEPS - len(before) // EVERY * EVERY
    assert rest == reference[-len(rest) :]
    for rank in range(2):
        final = load(killed.out(2) / f"final-{rank}.pt")
        assert same(final, load(whole.out(1) / f"final-{rank}.pt"))
