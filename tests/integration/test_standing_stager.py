"""The main job with a standing stager: kills of torchrun's workers or of the whole job, notices, TLS.

The reference for the resumed runs was made under mpirun.
"""

from __future__ import annotations

import contextlib
import encodings.idna
import os
import signal
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import PeerLost
from holdfast.net.address import parse_address
from holdfast.net.handshake import JobStart
from holdfast.net.key import new_key
from tests.support.certificates import TestAuthority
from tests.support.cluster import check_continued, check_loadable, load, losses, same, wait_until
from tests.support.events import read_events
from tests.support.free_port import free_port
from tests.support.job import Job, environment
from tests.support.main_job import EVERY, PAUSE_AT, RUN, SAVED, STEPS
from tests.support.standing_scene import RANKS, Scene
from tests.support.standing_stager import standing_stager
from tests.support.torchrun import by_torchrun
from trainer_side.ranks.connecting import Connector

NEVER, MANY = 10_000, 100_000
NEWEST = STEPS // EVERY * EVERY - 1
RING = "the stager's ring"


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    key = new_key()
    env = environment(tmp_path / "stager-runtime", HOLDFAST_KEY=key, HOLDFAST_EVENTS=str(tmp_path / "events"))
    (tmp_path / "store").mkdir()
    with standing_stager(str(tmp_path / "store"), env, tmp_path / "stager.log") as stager:
        yield Scene(tmp_path, stager, key)


def test_a_new_torchrun_joins_the_running_stager_and_goes_on_from_its_ring(
    scene: Scene, reference: Path
) -> None:
    with scene.start([*RUN, str(PAUSE_AT)], torchrun=True) as job:
        scene.wait_for_pause(job)
        job.kill()  # torchrun with all its workers
        for rank in range(RANKS):
            wait_until(lambda rank=rank: not _lives(scene.pid(rank)), 60, "a worker lives on")  # type: ignore[misc]
    with scene.start(RUN, torchrun=True) as job:
        job.succeed(240)
    check_continued(reference, scene.cluster, 1, 2, start=SAVED + 1, steps=STEPS)
    restores = scene.restores()
    assert [event["step"] for event in restores] == [SAVED] * RANKS
    assert all(set(event["sources"]) == {RING} for event in restores), restores
    # Each rank has read the whole checkpoint from shared memory.
    assert all(event["bytes_read"] == event["image_bytes"] for event in restores), restores
    # At its end the stager has written everything to the store.
    assert scene.stager.stop() == 0, scene.stager.output()
    files = sorted((scene.directory / "store").glob("step-*.pt"))
    assert files[-1].name.startswith(f"step-{NEWEST:09d}")
    check_loadable(files)
    assert not list((scene.directory / "stager-runtime").glob("*/journal"))


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_torchrun_restarts_the_workers_when_one_is_killed_and_the_stager_takes_them_at_once(
    scene: Scene, reference: Path
) -> None:
    with scene.start([*RUN, str(PAUSE_AT)], restarts=1) as job:
        scene.wait_for_pause(job)
        (scene.cluster.out(1) / "go-on").touch()  # for the ranks of the second start, and rank 0 of the first
        os.kill(scene.pid(1), signal.SIGKILL)
        job.succeed(240)
    for rank in range(RANKS):
        final = load(scene.cluster.out(1) / f"final-{rank}.pt")
        assert final["start"] == SAVED + 1
        assert same({**final, "start": 0}, load(reference / f"final-{rank}.pt"))
        assert losses(scene.cluster.out(1) / f"losses-{rank}") == losses(reference / f"losses-{rank}")
    assert [event["step"] for event in scene.restores()] == [SAVED] * RANKS
    assert "was left behind: its job was started again" in scene.stager.output()


def test_sigterm_to_torchrun_is_a_notice_and_the_stager_brings_all_ranks_to_one_step(scene: Scene) -> None:
    with scene.start(
        [str(MANY), str(NEVER)], torchrun=True, TRAIN_STEP_SECONDS="0.02", HOLDFAST_WATCH="sigterm"
    ) as job:
        path = scene.cluster.out(1) / "losses-1"
        wait_until(lambda: path.exists() and len(losses(path)) > 5, 240, job.output)
        os.kill(job.process.pid, signal.SIGTERM)
        wait_until(lambda: bool(list((scene.directory / "store").glob("step-*.json"))), 120, job.output)
        for rank in range(RANKS):
            with contextlib.suppress(ProcessLookupError):
                os.kill(scene.pid(rank), signal.SIGKILL)
        job.wait(120)
    (file,) = (scene.directory / "store").glob("step-*[0-9].json")
    (staged,) = {event["step"] for event in scene.events("staged")}
    assert int(file.name[5:14]) == staged


def test_ranks_with_another_key_are_told_once(scene: Scene) -> None:
    with scene.start(RUN, HOLDFAST_KEY="x" * 32) as job:
        assert job.wait(240) != 0
        assert job.output().count("has another key than this rank") == 1, job.output()


def test_a_job_over_tls_is_killed_and_a_new_one_goes_on_over_tls(tmp_path: Path, reference: Path) -> None:
    key, port = new_key(), free_port()
    authority = TestAuthority(tmp_path)
    pair = authority.sign("stager")
    env = environment(
        tmp_path / "stager-runtime",
        HOLDFAST_KEY=key,
        HOLDFAST_EVENTS=str(tmp_path / "events"),
        HOLDFAST_METRICS_PORT=str(port),
    )
    (tmp_path / "store").mkdir()
    shown = ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key))
    with standing_stager(str(tmp_path / "store"), env, tmp_path / "stager.log", *shown) as stager:
        scene = Scene(tmp_path, stager, key)
        trusted = str(authority.cert)
        with scene.start([*RUN, str(PAUSE_AT)], HOLDFAST_TLS_CA=trusted) as job:
            scene.wait_for_pause(job)
            assert 'holdfast_transport{transport="tls"} 1.0' in _page(port)
            job.kill()
        with scene.start(RUN, HOLDFAST_TLS_CA=trusted) as job:
            job.succeed(240)
        assert stager.stop() == 0, stager.output()
    check_continued(reference, scene.cluster, 1, 2, start=SAVED + 1, steps=STEPS)
    assert [set(event["sources"]) for event in scene.restores()] == [{RING}] * RANKS
    assert [event["transport"] for event in scene.events("stager_ready")] == ["tls"] * 2
    for file in (tmp_path / "store").glob("step-*.pt"):
        load(file)


def _page(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        page: bytes = answer.read()
    return page.decode()


def _as_nobody(address: str, key: bytes | None) -> str:
    """Return the stager's answer to a process of another user that asks to join."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgid(65534)
        os.setuid(65534)
        try:
            connector = Connector(
                parse_address(address), key, rank=0, ranks=1, start=JobStart("theirs", b"2" * 16), tls=None
            )
            connector.open(0, seconds_max=20)
            said = "admitted"
        except BaseException as error:  # noqa: BLE001 - told to the parent
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.skipif(os.geteuid() != 0, reason="plays another user")
def test_without_a_key_ranks_of_this_user_are_served_and_other_users_are_not(tmp_path: Path) -> None:
    env = environment(tmp_path / "stager-runtime")
    (tmp_path / "store").mkdir()
    with standing_stager(str(tmp_path / "store"), env, tmp_path / "stager.log") as stager:
        scene = Scene(tmp_path, stager, "")
        said = [_as_nobody(stager.address, key) for key in (None, b"", b"x" * 32)]
        assert said[0].startswith("ConfigError: the stager at 127.0.0.1")
        assert "need the same key" in said[0]
        assert all("has another key than this rank" in one for one in said[1:]), said
        with scene.start(RUN) as job:
            job.succeed(240)
