"""A running job's stager ends, or is cut off: the job continues with the next one at that address.

torchrun is there where it restarts the ranks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import PeerLost
from holdfast.net.key import new_key
from tests.support.cluster import check_continued, load, losses, same, wait_until
from tests.support.cut_link import cut_link
from tests.support.job import Job, environment
from tests.support.main_job import EVERY, PAUSE_AT, RUN, SAVED, STEPS
from tests.support.standing_scene import RANKS, Scene
from tests.support.standing_stager import StandingProcess, standing_stager

NEWEST = STEPS // EVERY * EVERY - 1
BACK = "the stager is reached again"
SECONDS_MAX = 240


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    key = new_key()
    env = _environment(tmp_path, key)
    (tmp_path / "store").mkdir()
    with standing_stager(str(tmp_path / "store"), env, tmp_path / "stager.log") as stager:
        yield Scene(tmp_path, stager, key)


@pytest.fixture
def ends() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def _environment(directory: Path, key: str, **more: str) -> dict[str, str]:
    events = str(directory / "events")
    return environment(directory / "stager-runtime", HOLDFAST_KEY=key, HOLDFAST_EVENTS=events, **more)


def _another(
    scene: Scene, runtime: str = "stager-runtime"
) -> contextlib.AbstractContextManager[StandingProcess]:
    """A stager at the same address, as the machine's service manager would start it."""
    env = _environment(
        scene.directory, scene.env["HOLDFAST_KEY"], HOLDFAST_RUNTIME_DIR=str(scene.directory / runtime)
    )
    log = scene.directory / "second-stager.log"
    return standing_stager(scene.cluster.store, env, log, listen=scene.stager.address)


def _go_on(scene: Scene) -> None:
    (scene.cluster.out(1) / "go-on").touch()


def _wait_for(job: Job, said: str, times: int = RANKS) -> None:
    def seen() -> bool:
        assert job.process.poll() is None, job.output()
        return job.output().count(said) >= times

    wait_until(seen, SECONDS_MAX, lambda: f"{said!r} was not said {times} times:\n{job.output()}")


def _check_as_undisturbed(scene: Scene, reference: Path) -> None:
    """All ranks have trained as if nothing had happened, and the newest step is in the store."""
    for rank in range(RANKS):
        assert same(load(scene.cluster.out(1) / f"final-{rank}.pt"), load(reference / f"final-{rank}.pt"))
        assert losses(scene.cluster.out(1) / f"losses-{rank}") == losses(reference / f"losses-{rank}")
    files = sorted((scene.directory / "store").glob("step-*.pt"))
    assert files[-1].name.startswith(f"step-{NEWEST:09d}"), files
    for file in files:
        load(file)


def test_a_running_job_goes_on_with_the_stager_that_follows_one_that_was_told_to_stop(
    scene: Scene, reference: Path, ends: contextlib.ExitStack
) -> None:
    """The tests below have stagers that are killed."""
    with scene.start([*RUN, str(PAUSE_AT)]) as job:
        scene.wait_for_pause(job)
        assert scene.stager.stop() == PeerLost.exit_code, scene.stager.output()
        assert "told to stop before its job had ended" in scene.stager.output()
        _wait_for(job, "no checkpoints are taken until it is reached again")
        second = ends.enter_context(_another(scene))
        _wait_for(job, BACK)
        _go_on(scene)
        job.succeed(SECONDS_MAX)
    _check_as_undisturbed(scene, reference)
    back = scene.events("stager_back")
    assert sorted(event["rank"] for event in back) == list(range(RANKS))
    assert {event["attempt"] for event in back} == {2}
    names = {path.name for path in (scene.directory / "store").glob("step-*.pt")}
    assert {f"step-{SAVED:09d}.pt", f"step-{NEWEST:09d}-a002.pt"} <= names, "one of each attempt"
    with scene.start(RUN) as job:  # takes what the second attempt of the first one has saved
        job.succeed(SECONDS_MAX)
    assert [event["step"] for event in scene.restores()] == [NEWEST] * RANKS
    assert second.stop() == 0, second.output()


def test_a_job_whose_links_were_cut_for_long_goes_on_with_the_same_stager(
    tmp_path: Path, reference: Path
) -> None:
    key = new_key()
    env = _environment(tmp_path, key, HOLDFAST_RECONNECT_SECONDS_MAX="1")
    (tmp_path / "store").mkdir()
    with (
        standing_stager(str(tmp_path / "store"), env, tmp_path / "stager.log") as stager,
        cut_link(int(stager.address.rpartition(":")[2])) as link,
    ):
        scene = Scene(tmp_path, stager, key)
        scene.env |= {
            "HOLDFAST_STAGER": f"127.0.0.1:{link.port}",
            "HOLDFAST_RECONNECT_SECONDS_MAX": "1",
        }
        with scene.start([*RUN, str(PAUSE_AT)]) as job:
            scene.wait_for_pause(job)
            link.refuse(True)
            link.cut()
            _wait_for(job, "no checkpoints are taken until it is reached again")
            link.refuse(False)
            _wait_for(job, BACK)
            _go_on(scene)
            job.succeed(SECONDS_MAX)
        _check_as_undisturbed(scene, reference)
        assert stager.stop() == 0, stager.output()


def test_a_rank_that_dies_when_the_stager_is_back_is_restarted_and_resumes(
    scene: Scene, reference: Path
) -> None:
    """The other rank may be in the session by then, or not; both are started again."""
    fired = scene.directory / "fired"
    fired.mkdir()
    with scene.start(
        [*RUN, str(PAUSE_AT)],
        restarts=1,
        HOLDFAST_FAULT="rank:1@rejoined=kill",
        HOLDFAST_FAULT_FIRED=str(fired),
    ) as job:
        scene.wait_for_pause(job)
        scene.stager.kill()
        _wait_for(job, "no checkpoints are taken until it is reached again")
        with _another(scene):
            wait_until(lambda: bool(list(fired.iterdir())), SECONDS_MAX, "nobody was killed")
            _go_on(scene)  # the second start; of the first a rank is dead
            job.succeed(SECONDS_MAX)
    for rank in range(RANKS):
        final = load(scene.cluster.out(1) / f"final-{rank}.pt")
        assert final["start"] == SAVED + 1
        assert same({**final, "start": 0}, load(reference / f"final-{rank}.pt"))


def test_with_on_stager_lost_end_the_training_ends_and_says_why(scene: Scene) -> None:
    with scene.start([*RUN, str(PAUSE_AT)], HOLDFAST_ON_STAGER_LOST="end") as job:
        scene.wait_for_pause(job)
        scene.stager.kill()
        _wait_for(job, "the stager is lost, and no more checkpoints are taken in this job")
        _go_on(scene)
        assert job.wait(SECONDS_MAX) != 0
    assert "the training ends, because on_stager_lost is end" in job.output()
    assert BACK not in job.output()


def test_a_stager_that_never_comes_back_leaves_the_training_alone_and_another_one_takes_the_next_job(
    scene: Scene, reference: Path
) -> None:
    with scene.start([*RUN, str(PAUSE_AT)]) as job:
        scene.wait_for_pause(job)
        os.kill(scene.stager.process.pid, signal.SIGKILL)
        _wait_for(job, "no checkpoints are taken until it is reached again")
        _go_on(scene)
        assert job.wait(SECONDS_MAX) != 0
    assert "NotDurable" in job.output()
    assert f"step {NEWEST}, the newest that was to be saved, is not durable" in job.output()
    for rank in range(RANKS):
        assert losses(scene.cluster.out(1) / f"losses-{rank}") == losses(reference / f"losses-{rank}")
    with _another(scene) as second:
        with scene.start(RUN) as job:
            job.succeed(SECONDS_MAX)
        check_continued(reference, scene.cluster, 1, 2, start=SAVED + 1, steps=STEPS)
        assert second.stop() == 0, second.output()


def test_a_stager_whose_machine_is_gone_is_followed_by_one_without_its_ring(
    scene: Scene, reference: Path
) -> None:
    """As when a pod is placed elsewhere under the same name: neither ring nor flusher are there any more."""
    with scene.start([*RUN, str(PAUSE_AT)]) as job:
        scene.wait_for_pause(job)
        (pid_file,) = (scene.directory / "stager-runtime").glob("*/flusher.pid")
        flusher = int(pid_file.read_text())
        scene.stager.kill()
        os.kill(flusher, signal.SIGKILL)
        shutil.rmtree(scene.directory / "stager-runtime")
        _wait_for(job, "no checkpoints are taken until it is reached again")
        with _another(scene, "other-runtime") as second:
            _wait_for(job, BACK)
            _go_on(scene)
            job.succeed(SECONDS_MAX)
            assert second.stop() == 0, second.output()
    _check_as_undisturbed(scene, reference)


def test_local_tiers_go_on_meanwhile_and_belong_to_the_new_attempt_afterwards(
    scene: Scene, reference: Path
) -> None:
    with scene.start([*RUN, str(PAUSE_AT)], HOLDFAST_TIERS="memory") as job:
        scene.wait_for_pause(job)
        scene.stager.kill()
        _wait_for(
            job, "nothing goes to it until it is reached again; training goes on, and checkpoints are kept"
        )
        with _another(scene) as second:
            _wait_for(job, BACK)
            _go_on(scene)
            job.succeed(SECONDS_MAX)
            _check_as_undisturbed(scene, reference)
            assert [event for event in scene.events("complete") if event["step"] == NEWEST]
            with scene.start(RUN, HOLDFAST_TIERS="memory") as next_job:
                next_job.succeed(SECONDS_MAX)
            assert second.stop() == 0, second.output()
    restores = scene.restores()
    assert {(event["step"], event["attempt"]) for event in restores} == {(NEWEST, 2)}
    assert all("memory" in event["sources"] for event in restores), "the tier is as new as the ring"
