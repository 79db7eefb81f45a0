"""`holdfast status` with a real flusher, as JSON and in plain text; test_watched_job has a whole job."""

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
from tests.support.standing_stager import standing_stager

RANKS = 2

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


@pytest.fixture
def image(tmp_path: Path) -> Image:
    torch.manual_seed(1)
    torch.save({f"layer.{n}": torch.randn(400, 101) for n in range(4)}, tmp_path / "original.pt")
    return from_torch_file(tmp_path / "original.pt", chunk_bytes=64 * 1024, ranks=RANKS)


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
        assert any("the next job publishes the staged checkpoints" in note for note in run["notes"])
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


def test_standing_stagers_say_where_they_wait_and_the_newest_run_is_first(tmp_path: Path) -> None:
    env = environment(tmp_path / "rt")
    with (
        standing_stager(str(tmp_path / "first"), env, tmp_path / "first.log") as first,
        standing_stager(str(tmp_path / "second"), env, tmp_path / "second.log") as second,
    ):
        runs = json.loads(status(tmp_path / "rt", "--json"))["runs"]
        assert [(run["run"], run["waits_at"]) for run in runs] == [
            (str(tmp_path / "second"), second.address),
            (str(tmp_path / "first"), first.address),
        ]
        assert [(run["is_running"], run["stager"]["state"]) for run in runs] == [(False, "here")] * 2
        said = status(tmp_path / "rt")
    assert said.count("waits for a job at 127.0.0.1:") == 2
    assert "does not answer" not in said
    assert "LOSES" not in said


def test_a_run_that_is_nowhere_is_an_error_with_its_code(tmp_path: Path) -> None:
    assert (
        json.loads(status(tmp_path / "rt", str(tmp_path / "run"), "--json", code=5))["error"]["code"]
        == "missing"
    )
    status(tmp_path / "rt", code=5)
    status(tmp_path / "rt", str(tmp_path), "--dollars-per-hour", "-1", code=2)
