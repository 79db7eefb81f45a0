"""A bug kills a thread of a rank in real jobs: the cause is reported, saves decline and name the thread, no wait hangs.

The bug is planted on rank 1 of 2; everything else is real.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.jobs import breaking
from tests.support.cluster import Cluster, wait_until
from tests.support.job import environment
from tests.support.signals import INTERRUPTIBLE
from tests.support.standing_stager import standing_stager

pytestmark = [pytest.mark.mpi]
SECONDS_MAX = 150.0
AFTER = breaking.STEPS - breaking.BREAKS_AT


def met(cluster: Cluster, *ranks: int) -> list[dict[str, Any]]:
    """Return the errors that these ranks met, by default both."""
    out = cluster.out(cluster.started)
    return [json.loads((out / f"met-{rank}").read_text()) for rank in ranks or (0, 1)]


def check_said(said: str, thread: str) -> None:
    """The error is reported once, with cause and location."""
    assert said.count(f"rank 1: the thread {thread}, which ") >= 1, said
    assert said.count("RuntimeError: a planted bug\n") >= 1
    assert "in bug\n" in said, "no traceback says where"
    assert f"ThreadDied: rank 1: the thread {thread}" in said, said


def make(tmp_path: Path, **env: str) -> Cluster:
    env = {
        "HOLDFAST_ON_NOT_DURABLE": "warn",
        **env,
    }  # otherwise the other rank may end first, with its own error
    return Cluster(tmp_path, str(tmp_path / "store"), env, script=breaking.__file__)


@pytest.mark.parametrize(("how", "thread"), [("copy", "holdfast-copy"), ("link", "holdfast-link")])
def test_a_broken_thread_is_named_with_a_stager(tmp_path: Path, how: str, thread: str) -> None:
    cluster = make(tmp_path)
    with cluster.start(2, how, forked=how == "copy") as job:
        code = job.wait(SECONDS_MAX)
        said = job.output()
    assert code in {9, 11}, (
        said
    )  # the exit code of the first to end: the broken rank, or one whose last step is not durable
    check_said(said, thread)
    first, second = met(cluster)
    assert second["saved"][: breaking.BREAKS_AT] == [True] * breaking.BREAKS_AT
    assert not any(second["saved"][breaking.BREAKS_AT + 1 :]), "a later save() says that it was begun"
    assert sum(second["causes"].values()) >= AFTER
    assert sum(first["causes"].values()) >= AFTER - 2, "rank 0 was not told"
    assert thread in second["error"]
    cluster.wait_for_flusher()


def check_tiers(tmp_path: Path, how: str, thread: str) -> None:
    """Kill a thread of a rank with tiers and without a stager."""
    env = {"HOLDFAST_TIERS": f"file:{tmp_path / 'tier'}", "HOLDFAST_STORE": str(tmp_path / "store")}
    cluster = make(tmp_path, **env, HOLDFAST_TIER_WRITERS="1", HOLDFAST_TIER_SECONDS_MAX="10")
    with cluster.start(2, how, stager=False) as job:
        code = job.wait(SECONDS_MAX)
        said = job.output()
    assert code == 9, said
    check_said(said, thread)
    (second,) = met(cluster, 1)
    assert not any(second["saved"][breaking.BREAKS_AT + 1 :])
    assert thread in second["error"]


def test_over_tcp(tmp_path: Path) -> None:
    check_tcp(tmp_path, "reconnect", "holdfast-reconnect")


def check_tcp(tmp_path: Path, how: str, thread: str) -> None:
    """Kill a thread of a rank with a standing stager."""
    cluster = make(tmp_path, HOLDFAST_CONNECTIONS="1")
    env = environment(tmp_path / "runtime-stager")
    (tmp_path / "store").mkdir()
    with standing_stager(cluster.store, env, tmp_path / "stager.log") as stager:
        address = {"HOLDFAST_STAGER": stager.address, "HOLDFAST_RECONNECT_SECONDS_MAX": "5"}
        with cluster.start(2, how, stager=False, env=address, forked=True) as job:
            code = job.wait(SECONDS_MAX)
            said = job.output()
    assert code != 0, said
    check_said(said, thread)
    first, second = met(cluster)
    assert not any(second["saved"][breaking.BREAKS_AT + 1 :])
    assert sum(first["causes"].values()) >= AFTER - 2, "rank 0 was not told"
    assert thread in second["error"]


def test_a_watch_that_dies_is_said_and_checkpoints_go_on(tmp_path: Path) -> None:
    cluster = make(tmp_path, HOLDFAST_WATCH="sigusr1")
    with cluster.start(2, "watch", forked=True) as job:
        job.succeed(SECONDS_MAX)
        said = job.output()
    assert (
        "rank 1: the thread holdfast-watch, which listens for preemption notices, of which this rank receives no "
        "further ones" in said
    )
    assert [rank["saved"] for rank in met(cluster)] == [[True] * breaking.STEPS] * 2
    cluster.wait_for_flusher()


# tests/soak/test_breaking.py has the rest.
REGULAR = ("raise",)
ENDS = {
    "raise": ("ValueError: the bug of the script", 1, [1]),
    "all": ("ValueError: the bug of the script", 1, [0, 1]),
    "exit": ("SystemExit: 3", 3, [0, 1]),
    "stop": ("KeyboardInterrupt", 1, [0, 1]),
    "generator": ("GeneratorExit", 1, [0, 1]),
}


@pytest.mark.parametrize("how", REGULAR)
def test_an_exception_of_the_script_is_said_first_and_ends_the_block_although_nothing_becomes_durable(
    tmp_path: Path, how: str
) -> None:
    check_exception(tmp_path, how)


def check_exception(tmp_path: Path, how: str) -> None:
    """Stop the flusher: `close()` would wait ten minutes for it."""
    cluster = make(tmp_path)
    said_by, _, ranks = ENDS[how]
    with cluster.start(2, how, forked=True) as job:
        out = cluster.out(1)

        def left() -> bool:
            return all((out / f"met-{rank}").exists() for rank in ranks)

        try:
            wait_until(left, SECONDS_MAX, lambda: f"the block does not end:\n{job.output()}")
            said = job.output()
        finally:
            flusher(cluster).send_signal(signal.SIGCONT)
        job.wait(SECONDS_MAX)
    lines = said.splitlines()
    for rank in ranks:
        (first,) = [line for line in lines if f"rank {rank}: {said_by}" in line]
        assert "ends the training; waiting until checkpoints in flight are staged, at most 10 s" in first
        assert json.loads((out / f"met-{rank}").read_text())["error"]
    if 0 in ranks:
        assert (
            f"step {breaking.BREAKS_AT - 1} is durable, step {breaking.BREAKS_AT} is staged, and the flusher makes it "
            "durable; to continue from there, start the same command again" in said
        ), said
    cluster.wait_for_flusher()


def flusher(cluster: Cluster) -> psutil.Process:
    (path,) = cluster.runtime.rglob("flusher.pid")
    return psutil.Process(int(path.read_text().split()[0]))


_ALONE = """
import logging, os, signal, sys, time
import torch
from trainer_side import Checkpointer, leaving
leaving.EXIT_SECONDS_MAX = 60.0  # the second interrupt ends the wait, and not its limit on a slow machine
value = torch.zeros(100_000)
with Checkpointer({"value": value}) as checkpointer:
    checkpointer.restore()
    checkpointer.save(0)
    while checkpointer.durable_step < 0:
        time.sleep(0.01)
    os.kill(int(sys.argv[1]), signal.SIGSTOP)
    checkpointer.save(1)
    print("begun", flush=True)
    time.sleep(60)
"""


def test_ctrl_c_twice_ends_the_wait_and_says_which_step_is_durable(tmp_path: Path) -> None:
    """The stager is stopped, so the step in flight is not staged."""
    env = environment(tmp_path / "runtime")
    (tmp_path / "store").mkdir()
    with standing_stager(str(tmp_path / "store"), env, tmp_path / "stager.log") as stager:
        child = subprocess.Popen(
            [*INTERRUPTIBLE, sys.executable, "-c", _ALONE, str(stager.process.pid)],
            env={**env, "HOLDFAST_STAGER": stager.address},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        assert child.stderr is not None
        try:
            assert child.stdout.readline() == "begun\n"
            child.send_signal(signal.SIGINT)
            said = next(line for line in child.stderr if "KeyboardInterrupt" in line)
            assert "rank 0: KeyboardInterrupt (at <string>:" in said
            time.sleep(0.5)  # so that the interrupt does not hit the last write
            child.send_signal(signal.SIGINT)
            _, rest = child.communicate(timeout=SECONDS_MAX)
        finally:
            child.kill()
            stager.process.send_signal(signal.SIGCONT)
    assert child.returncode == -signal.SIGINT, rest
    assert "KeyboardInterrupt ends the wait for checkpoints in flight" in rest
    assert "step 0 is durable; to continue from there, start the same command again" in rest
    assert "IndexError" not in rest
