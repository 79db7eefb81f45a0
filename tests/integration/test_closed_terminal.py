"""SIGHUP from a closing terminal acts like SIGTERM on stager, flusher, `holdfast run` and `holdfast rank`."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from holdfast.errors import PeerLost
from holdfast.net.key import new_key
from holdfast.ring.directory import runtime_directory
from operator_side.supervise.exit_codes import RETRY_EXIT_CODE
from tests.integration.jobs import supervised, train
from tests.integration.test_run import SETTINGS, Run, run
from tests.support.cluster import SMALL, Cluster, wait_until
from tests.support.events import read_events
from tests.support.free_port import free_port
from tests.support.job import HOLDFAST, environment
from tests.support.main_job import PAUSE_AT, RUN, SAVED
from tests.support.torchrun import by_torchrun

__all__ = ["run"]

SECONDS_MAX = 240.0
# Writes down what it is told, and leaves a second after the first word: what comes twice comes at once.
LISTENER = """
import signal, sys, time
told = []
for number in (signal.SIGHUP, signal.SIGTERM):
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, lambda number, _: told.append(signal.Signals(number).name))
open(sys.argv[1], "w").write("listens\\n")
until = time.monotonic() + 200
while not told and time.monotonic() < until:
    time.sleep(0.05)
until = time.monotonic() + 1
while time.monotonic() < until:
    time.sleep(0.05)
open(sys.argv[1], "a").write(" ".join(told))
"""


class Terminal:
    """A command as the leader of a session on a terminal of its own. Nothing of it outlives the block.

    Attributes:
        process: It.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        self._said = b""
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command],  # which becomes the command
            env=dict(env),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)

    def said(self) -> str:
        """All that is on the screen."""
        while select.select([self._ours], [], [], 0)[0]:
            try:
                data = os.read(self._ours, 1 << 16)
            except OSError:  # nobody has the other end any more
                break
            self._said += data
        return self._said.decode(errors="replace")

    def wait_for(self, words: str) -> None:
        """Until they are on the screen."""
        wait_until(lambda: words in self.said() or self.process.poll() is not None, SECONDS_MAX, words)
        assert words in self.said(), self.said()

    def close(self) -> None:
        """The window is closed: the kernel sends SIGHUP, and whoever writes there gets EIO."""
        if self._ours >= 0:
            os.close(self._ours)
            self._ours = -1

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def stager_line(store: Path, listen: str) -> list[str]:
    return [HOLDFAST, "stager", "--store", str(store), "--listen", listen, *SMALL]


def staged(events: Path) -> set[int]:
    return {line["step"] for line in read_events(events) if line["event"] == "staged"}


def test_a_stager_whose_terminal_closes_in_mid_job_writes_what_is_staged(tmp_path: Path) -> None:
    key, runtime = new_key(), tmp_path / "stager-runtime"
    (tmp_path / "store").mkdir()
    events = tmp_path / "events"
    env = environment(runtime, HOLDFAST_KEY=key, HOLDFAST_EVENTS=str(events))
    address = f"127.0.0.1:{free_port()}"
    cluster = Cluster(tmp_path, str(tmp_path / "store"), {}, script=train.__file__)
    joined = {"HOLDFAST_STAGER": address, "HOLDFAST_KEY": key, "HOLDFAST_ON_NOT_DURABLE": "warn"}
    with Terminal(stager_line(tmp_path / "store", address), env) as terminal:
        terminal.wait_for("listens at")
        start = {"stager": False, "rewrite": by_torchrun(2), "env": joined}
        with cluster.start(2, *RUN, str(PAUSE_AT), **start) as job:  # type: ignore[arg-type]
            paused = [cluster.out(1) / f"paused-{rank}" for rank in range(2)]
            wait_until(lambda: all(path.exists() for path in paused), SECONDS_MAX, job.output)
            wait_until(
                lambda: SAVED in staged(events), SECONDS_MAX, job.output
            )  # ranks send while they pause
            terminal.close()
            assert terminal.process.wait(SECONDS_MAX) == PeerLost.exit_code
            assert list((tmp_path / "store").glob(f"step-{SAVED:09d}*.json"))
            assert not runtime_directory(str(tmp_path / "store"), runtime).exists(), "a flusher is left"
            (cluster.out(1) / "go-on").touch()
            job.succeed(SECONDS_MAX)


def test_a_second_sighup_does_not_end_the_stager_at_once(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    env = environment(tmp_path / "runtime")
    with Terminal(stager_line(tmp_path / "store", "127.0.0.1:0"), env) as terminal:
        terminal.wait_for("listens at")
        for _ in range(2):
            terminal.process.send_signal(signal.SIGHUP)
        assert terminal.process.wait(SECONDS_MAX) == 0, terminal.said()


def test_a_flusher_whose_terminal_closes_gives_everything_back(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    env = environment(tmp_path / "runtime")
    line = [HOLDFAST, "flusher", "--store", str(tmp_path / "store"), *SMALL, "--linger"]
    with Terminal(line, env) as terminal:
        terminal.wait_for('"ready"')
        terminal.close()
        assert terminal.process.wait(SECONDS_MAX) == 0
    assert not runtime_directory(str(tmp_path / "store"), tmp_path / "runtime").exists()


@pytest.mark.mpi
def test_holdfast_run_whose_terminal_closes_leaves_no_process(run: Run) -> None:
    job = [sys.executable, supervised.__file__, str(run.directory / "out"), *RUN, str(PAUSE_AT)]
    line = [HOLDFAST, "run", "-n", "2", "--store", run.store, "--logs", str(run.logs), "--grace-seconds", "5"]
    env = environment(run.runtime, HOLDFAST_EVENTS=str(run.logs / "events.jsonl"))
    with Terminal([*line, *SETTINGS, "--", *job], env) as terminal:
        run.process = terminal.process
        run.pause()
        terminal.said()
        terminal.close()
        assert terminal.process.wait(SECONDS_MAX) == 130, run.status()
    assert [line["cause"] for line in run.status("over")] == ["stopped"]
    run.assert_nothing_left()
    assert list(run.folder.glob(f"step-{SAVED:09d}*.json"))


def test_a_rank_whose_terminal_closes_has_one_notice(tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    line = [HOLDFAST, "rank", "--", sys.executable, "-c", LISTENER, str(heard)]
    with Terminal(line, environment(tmp_path / "runtime")) as terminal:
        wait_until(lambda: heard.exists() and heard.read_text() == "listens\n", SECONDS_MAX, "no command")
        terminal.process.send_signal(signal.SIGHUP)  # of a shell
        terminal.close()
        assert terminal.process.wait(SECONDS_MAX) == RETRY_EXIT_CODE
    assert heard.read_text() == "listens\nSIGTERM"


def told_apart(pid: int) -> tuple[bool, bool]:
    """Whether the process handles SIGHUP, and whether it ignores it."""
    words = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )
    bit = 1 << (signal.SIGHUP - 1)
    return bool(int(words["SigCgt"], 16) & bit), bool(int(words["SigIgn"], 16) & bit)


def handles_sigterm(pid: int) -> bool:
    with contextlib.suppress(OSError):
        found = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        return found is not None and bool(int(found[1], 16) & 1 << (signal.SIGTERM - 1))
    return False


@contextlib.contextmanager
def begun(line: Sequence[str], env: Mapping[str, str], log: Path) -> Iterator[int]:
    """The command, once it handles SIGTERM; ended at the end."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            line,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        wait_until(lambda: handles_sigterm(process.pid) or process.poll() is not None, SECONDS_MAX, str(line))
        assert process.poll() is None, log.read_text()
        yield process.pid
        process.send_signal(signal.SIGTERM)
        process.wait(SECONDS_MAX)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "stager": lambda store: stager_line(store, "127.0.0.1:0"),
    "flusher": lambda store: [HOLDFAST, "flusher", "--store", str(store), *SMALL, "--linger"],
    "run": lambda store: [
        HOLDFAST,
        "run",
        "-n",
        "1",
        "--store",
        str(store),
        "--logs",
        f"{store}-logs",
        "--",
        "sleep",
        "200",
    ],
    "rank": lambda store: [HOLDFAST, "rank", "--", "sleep", "200"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_under_nohup_sighup_stays_ignored(tmp_path: Path, command: str) -> None:
    for number, before in enumerate(([], ["nohup"])):
        store = tmp_path / f"store-{number}"
        store.mkdir()
        env = environment(tmp_path / f"runtime-{number}")
        with begun([*before, *COMMANDS[command](store)], env, tmp_path / f"log-{number}") as pid:
            wait_until(lambda pid=pid: any(told_apart(pid)), 60, "neither handled nor ignored")  # type: ignore[misc]
            assert told_apart(pid) == ((False, True) if before else (True, False))
