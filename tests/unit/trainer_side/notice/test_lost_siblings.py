"""SIGTERM ends a rank at once if another rank has died, wherever its main thread is; otherwise not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer_side.notice.lost_siblings import find_sibling_ranks

_SLEEPS = "import time; time.sleep(60)"
_RANK = """
import ctypes, os, signal, sys
from trainer_side.notice.lost_siblings import LostSiblings
from trainer_side.notice.signals import SignalSource

if sys.argv[2] == "own":
    signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"own\\n"))
siblings = LostSiblings([int(sys.argv[1])], rank=0)
source = SignalSource(
    signal.SIGTERM, grace_seconds=30, wake=lambda: os.write(1, b"woken\\n"), is_void=siblings.any_ended
)
siblings.start(lambda: source.ends_by_default)
print("ready", flush=True)
sys.stdin.readline()
print("noticed" if source.poll() else "nothing", flush=True)
if sys.argv[2] == "stuck":  # as in a collective on a device: Python's handler never runs
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
while len(sys.stdin.readline()) > 1:
    pass
siblings.close()
print("closed", flush=True)
"""


@pytest.fixture
def sibling() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-S", "-c", _SLEEPS])
    yield process
    process.kill()
    process.wait()


def rank(sibling: subprocess.Popen[bytes], how: str, folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _RANK, str(sibling.pid), how],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def tell(process: subprocess.Popen[str], line: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return process.stdout.readline()


@pytest.mark.parametrize("how", ["stuck", "runs"])
def test_sigterm_after_the_end_of_another_rank_ends_this_one_at_once(
    sibling: subprocess.Popen[bytes], tmp_path: Path, how: str
) -> None:
    process = rank(sibling, how, tmp_path)
    assert tell(process, "go on") == "nothing\n"
    sibling.kill()
    sibling.wait()
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert (process.returncode, said) == (-signal.SIGTERM, ""), "it was no notice"


def test_sigterm_is_a_notice_while_the_other_rank_lives(
    sibling: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    process = rank(sibling, "runs", tmp_path)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "woken\n"
    assert tell(process, "go on") == "noticed\n"
    assert tell(process, "") == "closed\n"
    process.communicate()
    assert process.returncode == 0


def test_a_handler_of_the_script_is_called_whoever_has_ended(
    sibling: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    process = rank(sibling, "own", tmp_path)
    sibling.kill()
    sibling.wait()
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "woken\n"
    assert process.stdout.readline() == "own\n"
    process.communicate("\n")
    assert process.returncode == 0


def test_ranks_of_torchrun_are_its_children_that_have_its_variables() -> None:
    env = {**os.environ, "TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "0"}
    started = [
        subprocess.Popen([sys.executable, "-S", "-c", _SLEEPS], env=env),
        subprocess.Popen([sys.executable, "-S", "-c", _SLEEPS], env=env),
        subprocess.Popen([sys.executable, "-S", "-c", _SLEEPS], env={**os.environ}),
    ]
    try:
        first, second, _ = (process.pid for process in started)
        assert find_sibling_ranks(first, 2) == [second]
        assert find_sibling_ranks(first, 3) == []
        assert find_sibling_ranks(first, 1) == []
    finally:
        for process in started:
            process.kill()
            process.wait()
