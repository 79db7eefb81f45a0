"""`holdfast status` beside a real job: live in a real terminal (tmux) while ranks are killed, and as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from holdfast.ring.ring import Ring
from tests.integration.jobs import train
from tests.support.cluster import SMALL, Cluster, wait_until
from tests.support.flushers import watched
from tests.support.images import Image, from_torch_file
from tests.support.job import HOLDFAST, environment
from tests.support.stager_client import FlusherProcess, StagerClient

RANKS, STEPS, EVERY, PAUSE_AT, SAVED, SAVES = 2, 14, 4, 9, 7, 2
COLUMNS, LINES = 80, 50
SECONDS_MAX = 120


def status(runtime: Path, *arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [HOLDFAST, "status", *arguments],
        env=environment(runtime),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def document(runtime: Path, *arguments: str) -> dict[str, Any]:
    (run,) = json.loads(status(runtime, *arguments, "--json"))["runs"]
    assert isinstance(run, dict)
    return run


class Terminal:
    """A real terminal of 80 columns in which a command runs; what it showed last stays, and its exit code."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        # Python's readline sets LINES and COLUMNS for the children of the process that runs the tests.
        ours = {name: value for name, value in env.items() if name not in ("LINES", "COLUMNS")}
        self._env = {**ours, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
        self._server = ("tmux", "-L", f"holdfast-{os.getpid()}", "-f", "/dev/null")
        shell = f"trap : INT; {shlex.join(command)}; echo ended with $?; exec cat"
        self._tmux("new-session", "-d", "-x", str(COLUMNS), "-y", str(LINES), shell)

    def _tmux(self, *arguments: str) -> str:
        return subprocess.run(
            [*self._server, *arguments], env=self._env, capture_output=True, text=True, check=True
        ).stdout

    def screen(self) -> str:
        """What is to be seen."""
        return self._tmux("capture-pane", "-p")

    def wait_for(self, pattern: str) -> None:
        """Until it is to be seen."""
        deadline = time.monotonic() + SECONDS_MAX
        while not re.search(pattern, self.screen()):
            assert time.monotonic() < deadline, f"{pattern} is not to be seen:\n{self.screen()}"
            time.sleep(0.1)

    def interrupt(self) -> None:
        """Ctrl-C."""
        self._tmux("send-keys", "C-c")

    def close(self) -> None:
        self._tmux("kill-server")


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    if shutil.which("tmux") is None:
        pytest.skip("no tmux here")
    opened: list[Terminal] = []

    def start(*command: str, env: dict[str, str]) -> Terminal:
        opened.append(Terminal(list(command), env))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


@pytest.fixture
def image(tmp_path: Path) -> Image:
    torch.manual_seed(1)
    torch.save({f"layer.{n}": torch.randn(400, 101) for n in range(4)}, tmp_path / "original.pt")
    return from_torch_file(tmp_path / "original.pt", chunk_bytes=64 * 1024, ranks=RANKS)


@pytest.mark.mpi
def test_it_is_watched_in_a_terminal_while_its_ranks_are_killed(
    tmp_path: Path, terminal: Callable[..., Terminal]
) -> None:
    stager = (*SMALL, "--niceness", "10")
    cluster = Cluster(tmp_path, str(tmp_path / "store"), {}, script=train.__file__, stager=stager)
    with cluster.start(RANKS, str(STEPS), str(EVERY), str(PAUSE_AT)) as job:
        runtime, out = cluster.runtime, cluster.out(1)
        wait_until(
            lambda: all((out / f"paused-{rank}").exists() for rank in range(RANKS)),
            SECONDS_MAX,
            f"the ranks do not stand still:\n{job.output()}",
        )
        live = terminal(HOLDFAST, "status", "--interval-seconds", "0.1", env=environment(runtime))
        live.wait_for(rf"newest verified +{SAVED} ")
        live.wait_for("2 ranks: 2 here")
        run = document(runtime, cluster.store, "--dollars-per-hour", "3600")
        pids = [int((out / f"pid-{rank}").read_text()) for rank in range(RANKS)]
        ranks = sorted((rank["rank"], rank["pid"], rank["state"], rank["step"]) for rank in run["ranks"])
        assert ranks == [(rank, pids[rank], "here", SAVED) for rank in range(RANKS)]
        assert all(rank["stall_seconds"] > 0 for rank in run["ranks"])
        assert run["is_running"]
        of_stager, of_flusher = (psutil.Process(run[role]["pid"]).nice() for role in ("stager", "flusher"))
        assert (of_stager, of_flusher) == (10, 10)
        assert {psutil.Process(pid).nice() for pid in pids} == {psutil.Process().nice()}, (
            "training yields to none"
        )
        assert run["loss_trainers"]["since_step"] == run["loss_node"]["since_step"] == SAVED
        assert run["loss_trainers"]["dollars"] == pytest.approx(run["loss_trainers"]["seconds"])
        assert run["interval"]["steps"] == EVERY
        assert len(run["pgt1_seconds"]["history"]) == len(run["pgt2_seconds"]["history"]) == SAVES
        assert len(run["stall_seconds"]["history"]) == SAVES
        assert sum(run["ring"]["chunks"].values()) == run["ring"]["ring_chunks"] == 64
        os.kill(pids[1], signal.SIGKILL)
        live.wait_for("2 ranks: 1 here, 1 lost")
        live.wait_for("rank_lost: rank 1")
        os.kill(pids[0], signal.SIGKILL)
        live.wait_for("no stager; no flusher")  # all was durable: they had nothing more to do
        live.wait_for("no training job")
        live.wait_for(rf"newest verified +{SAVED} ")
        live.interrupt()
        live.wait_for("ended with 0")
        live.wait_for(rf"newest verified +{SAVED} ")  # the last picture stays
    cluster.wait_for_flusher()
    run = document(cluster.runtime, cluster.store)
    assert (run["flusher"]["state"], run["stager"]["state"], run["is_running"]) == ("gone", "gone", False)
    assert run["levels"]["verified"]["step"] == SAVED
    assert run["loss_node"]["seconds"] == 0


def test_a_flusher_that_stands_still_and_one_that_is_dead_are_told_apart_and_the_ring_is_not_disturbed(
    tmp_path: Path, image: Image
) -> None:
    runtime = tmp_path / "rt"
    with watched(tmp_path, partial(FlusherProcess, tmp_path)) as start:
        flusher = start()
        stager = StagerClient(flusher.directory)
        stager.save(image, 1)
        stager.wait("verified", step=1)
        flusher.freeze()
        stager.save(image, 2)
        stager.begin(image, 3)
        stager.send(image, 3, range(2))
        run = document(runtime, str(flusher.store))
        assert run["flusher"]["state"] == "silent"
        assert run["flights"] == [
            flight(image, 2, "staged", image.layout.image_bytes),
            flight(image, 3, "receiving", 2 * image.layout.chunk_bytes),
        ]
        assert run["levels"]["staged"]["step"] == 2
        flusher.kill()
        run = document(runtime, str(flusher.store))
        assert run["flusher"]["state"] == "gone"
        assert run["levels"]["durable"]["step"] == run["loss_node"]["since_step"] == 1  # the store says so
        assert run["levels"]["staged"]["step"] == run["loss_trainers"]["since_step"] == 2
        assert run["loss_node"]["steps"] == 1
        assert run["loss_node"]["seconds"] > run["loss_trainers"]["seconds"] == 0
        assert any("is published by the next job" in note for note in run["notes"])
        assert "no flusher" in status(runtime, str(flusher.directory))  # by its directory, too
        before = {path.name: path.stat().st_mtime_ns for path in flusher.directory.iterdir()}
        status(runtime)
        assert {path.name: path.stat().st_mtime_ns for path in flusher.directory.iterdir()} == before
        stager.close()
        assert start().wait() == 0
        assert flusher.manifest(2)["state"] == "verified"
    run = document(runtime, str(flusher.store))
    assert (run["levels"]["verified"]["step"], run["flights"], run["ring"]) == (2, [], None)


def flight(image: Image, step: int, state: str, ring_bytes: int) -> dict[str, Any]:
    return {
        "attempt": 1,
        "step": step,
        "state": state,
        "image_bytes": image.layout.image_bytes,
        "ring_bytes": ring_bytes,
        "written_bytes": None,
        "held": "",
    }


def test_bytes_in_the_ring_and_in_the_store_are_told_while_a_checkpoint_streams(
    tmp_path: Path, image: Image
) -> None:
    runtime = tmp_path / "rt"
    with watched(tmp_path, partial(FlusherProcess, tmp_path)) as start:
        flusher = start("--no-verify", ring="4MiB")
        with contextlib.closing(StagerClient(flusher.directory)) as stager:
            half = image.layout.chunks // 2
            stager.begin(image, 5)
            stager.send(image, 5, range(half))

            def told() -> dict[str, Any]:
                (one,) = document(runtime, str(flusher.store))["flights"]
                return dict(one)

            wait_until(lambda: bool(told()["written_bytes"]), SECONDS_MAX, "nothing is written")
            one = told()
            assert one["written_bytes"] % image.layout.chunk_bytes == 0
            assert one["written_bytes"] + one["ring_bytes"] <= half * image.layout.chunk_bytes
            assert re.search(r"5 +receiving .* of \d+\.\d KiB, \d+%", status(runtime, str(flusher.store)))
            stager.send(image, 5, range(half, image.layout.chunks))
            stager.staged(image, 5)
            stager.wait("durable", step=5)
            stager.finish()
        assert flusher.wait() == 0


def test_a_terminal_that_moves_no_cursor_gets_one_plain_picture(tmp_path: Path) -> None:
    runtime = tmp_path / "rt" / "run"
    runtime.parent.mkdir()
    Ring.create(runtime, chunk_bytes=4096, ring_chunks=8, attempt=1).close()
    ours, theirs = pty.openpty()
    env = {**environment(tmp_path / "rt"), "TERM": "dumb", "NO_COLOR": "1"}
    done = subprocess.run([HOLDFAST, "status"], env=env, stdout=theirs, timeout=60, check=False)
    os.close(theirs)
    text = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 0
    assert "0 of 8 chunks" in text
    assert "\x1b" not in text


def test_a_run_that_is_nowhere_is_an_error_with_its_code(tmp_path: Path) -> None:
    assert (
        json.loads(status(tmp_path / "rt", str(tmp_path / "run"), "--json", code=5))["error"]["code"]
        == "missing"
    )
    status(tmp_path / "rt", code=5)
    status(tmp_path / "rt", str(tmp_path), "--dollars-per-hour", "-1", code=2)
