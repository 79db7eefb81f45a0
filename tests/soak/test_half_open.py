"""A link that drops every packet for longer than either end waits, and recovers: in network namespaces."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.jobs import half_open
from tests.support.cluster import wait_until
from tests.support.job import environment

_SWALLOWED_SECONDS = 14.0
_STAGER = "10.79.1.1"


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=30)


@pytest.fixture
def link() -> Iterator[tuple[str, str]]:
    """The names of two namespaces with a link between them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root, and ip")
    names = (f"hf-half-s{os.getpid()}", f"hf-half-r{os.getpid()}")
    with contextlib.ExitStack() as stack:
        for name in names:
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "delete", name)
        ends = [f"hfh{end}{os.getpid()}" for end in "sr"]
        _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, (_STAGER, "10.79.1.2"), strict=True):
            _run("ip", "link", "set", end, "netns", name, "name", "link0")
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "link0")
            _run("ip", "-n", name, "link", "set", "link0", "up")
        yield names


def test_a_link_that_swallows_packets_is_found_out_and_nothing_is_lost(
    link: tuple[str, str], tmp_path: Path
) -> None:
    logs = (tmp_path / "stager", tmp_path / "rank")
    processes = []
    try:
        for role, name, log in zip(("stager", "rank"), link, logs, strict=True):
            with log.open("wb") as output:
                command = ["ip", "netns", "exec", name, sys.executable, half_open.__file__, role, _STAGER]
                env = environment(tmp_path / "run")
                processes.append(subprocess.Popen(command, env=env, stdout=output, stderr=output))
        stager, rank = processes
        wait_until(lambda: "joined" in logs[1].read_text(), 120, "the rank has not joined")
        time.sleep(2)
        _run("ip", "-n", link[0], "link", "set", "link0", "down")  # the other end notices nothing
        time.sleep(_SWALLOWED_SECONDS)
        assert "cut" in logs[1].read_text(), "the rank has not found out"
        _run("ip", "-n", link[0], "link", "set", "link0", "up")
        assert rank.wait(60) == 0, logs[1].read_text()
        assert stager.wait(60) == 0, logs[0].read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert "connected to the stager again" in logs[1].read_text()
    assert f"answers {half_open.MESSAGES} in order" in logs[0].read_text()
