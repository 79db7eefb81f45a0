"""Several stagers of one mpirun job: one file, byte for byte that of one stager, and what remains when one is lost."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast import faultpoint
from holdfast.errors import ConfigError, PeerLost, StoreError
from holdfast.ring.directory import runtime_directory
from tests.integration.jobs import train
from tests.support.cluster import (
    SMALL,
    Cluster,
    assert_nothing_left,
    check_continued,
    check_loadable,
    kill_ranks,
    wait_until,
)
from tests.support.events import read_events
from tests.support.job import Job
from tests.support.main_job import EVERY, PAUSE_AT, RUN, SAVED, STEPS
from tests.support.mpi_stagers import with_stagers
from tests.support.two_hosts import two_hosts, why_not

pytestmark = [pytest.mark.mpi]

RANKS = 2
SECONDS_MAX = 240.0
RING = "the stager's ring"
STEPS_SAVED = range(EVERY - 1, STEPS, EVERY)
WIDE = {"TRAIN_WIDTH": "1000"}  # seven chunks, so that each stager has more than one
FINE = ("--chunk-bytes", "8KiB")  # the state that `reference` trains has several chunks, too
SHORT = {
    "HOLDFAST_STAGER_SECONDS_MAX": "2",
    "HOLDFAST_ON_NOT_DURABLE": "warn",
    "TRAIN_STAGED_SECONDS_MAX": "2",
}
# Kills itself when all processes have met, before it has told the other stagers anything.
DIES_EARLY = "import os; from stager.mpi import MpiTrainersPort as p; p.join(60); os.kill(os.getpid(), 9)"


class Scene(Cluster):
    """A cluster of the main job whose processes write one event log."""

    def __init__(self, directory: Path, *settings: str, **env: str) -> None:
        (directory / "store").mkdir(parents=True)
        env = {"HOLDFAST_EVENTS": str(directory / "events"), **WIDE, **env}
        stager = (*SMALL, *settings)
        super().__init__(directory, str(directory / "store"), env, script=train.__file__, stager=stager)

    @property
    def files(self) -> list[Path]:
        return sorted(Path(self.store).glob("step-*.pt"))

    def events(self, kind: str, role: str = "trainer") -> list[dict[str, Any]]:
        lines = read_events(self.directory / "events")
        return [line for line in lines if (line["event"], line["role"]) == (kind, role)]

    def train(self, number: int, stagers: int, **more: Any) -> None:
        """A job that trains to the end; it is the `number`-th of the scene."""
        with self.start(RANKS, *RUN, rewrite=with_stagers(stagers), **more) as job:
            job.succeed(SECONDS_MAX)
        assert self.started == number

    def ended(self, job: Job) -> bool:
        """Whether both ranks have come to the end of their training."""
        finals = [self.out(self.started) / f"final-{rank}.pt" for rank in range(RANKS)]
        assert job.process.poll() is None or all(path.exists() for path in finals), job.output()
        return all(path.exists() for path in finals)


def _struck(
    scene: Scene, killed: int, action: str, point: str = "chunk_received#5"
) -> dict[int, Sequence[str]]:
    """The words before the command of one stager: in the middle of its share of the second checkpoint it is hit."""
    fired = scene.directory / "fired"
    fired.mkdir()
    fault = f"{faultpoint.VARIABLE}=stager@{point}={action}"
    return {killed: ("env", fault, f"{faultpoint.FIRED_VARIABLE}={fired}")}


def test_two_stagers_of_one_mpirun_write_the_file_that_one_writes(tmp_path: Path) -> None:
    scenes = {name: Scene(tmp_path / name) for name in ("one", "last", "first")}
    for name, scene in scenes.items():
        rewrite = with_stagers(1 if name == "one" else 2, first=name == "first")
        with scene.start(RANKS, *RUN, rewrite=rewrite) as job:
            job.succeed(SECONDS_MAX)
        assert_nothing_left(scene.runtime)
        assert len(scene.files) == len(STEPS_SAVED)
    ready = scenes["last"].events("stager_ready", "stager")
    assert [line["transport"] for line in ready] == ["mpi"] * 2
    assert {line["attempt"] for line in ready} == {1}
    check_loadable(scenes["last"].files)
    for other in ("last", "first"):
        assert [path.name for path in scenes[other].files] == [path.name for path in scenes["one"].files]
        for one, several in zip(scenes["one"].files, scenes[other].files, strict=True):
            assert one.read_bytes() == several.read_bytes(), one.name
            assert _shares(several) == 2, "one stager wrote it alone, so the comparison shows nothing"


def _shares(file: Path) -> int:
    """How many flushers have written it."""
    return int(json.loads(file.with_suffix(".json").read_text())["record"]["flusher"]["shares"])


@pytest.mark.parametrize("then", [1, 3])
def test_a_killed_job_is_resumed_by_another_number_of_stagers(
    tmp_path: Path, reference: Path, then: int
) -> None:
    scene = Scene(tmp_path, *FINE, TRAIN_WIDTH="64")
    with scene.start(RANKS, *RUN, str(PAUSE_AT), rewrite=with_stagers(2)) as job:
        kill_ranks(scene, job, RANKS, 1, saved=SAVED)
        job.kill()
    scene.train(2, then)
    check_continued(reference, scene, 1, 2, start=SAVED + 1, steps=STEPS)
    check_loadable(scene.files)


def test_a_job_that_is_killed_as_a_whole_resumes_from_the_rings_of_both_stagers(
    tmp_path: Path, reference: Path
) -> None:
    scene = Scene(tmp_path, *FINE, "--linger", TRAIN_WIDTH="64")
    try:
        with scene.start(RANKS, *RUN, str(PAUSE_AT), rewrite=with_stagers(2)) as job:
            ready = [scene.out(1) / f"paused-{rank}" for rank in range(RANKS)]
            wait_until(lambda: all(path.exists() for path in ready), SECONDS_MAX, job.output)
            newest = f"step-{SAVED:09d}"
            wait_until(lambda: any(newest in path.name for path in scene.files), SECONDS_MAX, job.output)
            job.kill()
        scene.train(2, 2, runtime=scene.runtime)
        check_continued(reference, scene, 1, 2, start=SAVED + 1, steps=STEPS)
        restores = scene.events("restore")
        assert [line["step"] for line in restores] == [SAVED] * RANKS
        assert all(set(line["sources"]) == {RING} for line in restores), restores
    finally:
        for path in scene.runtime.rglob("flusher.pid"):
            os.kill(int(path.read_text().split()[0]), signal.SIGTERM)
    assert_nothing_left(scene.runtime)
    check_loadable(scene.files)


@pytest.mark.parametrize("action", ["kill", "stop"])
@pytest.mark.parametrize("lost", [0, 1], ids=["lead", "member"])
def test_training_goes_on_without_checkpoints_when_a_stager_is_lost(
    tmp_path: Path, lost: int, action: str
) -> None:
    scene = Scene(tmp_path, "--rank-seconds-max", "4", **SHORT)
    before = _struck(scene, lost, action)
    with scene.start(RANKS, *RUN, rewrite=with_stagers(2, before=before)) as job:
        wait_until(lambda: scene.ended(job), SECONDS_MAX, job.output)
        if action == "stop":  # as long as it stands still, mpirun waits for it
            (struck,) = (tmp_path / "fired").iterdir()
            os.kill(int(struck.read_text()), signal.SIGKILL)
        job.wait(SECONDS_MAX)
        output = job.output()
    assert len(scene.events("stager_ended", "stager")) == 1, (
        "the other one does not wait for ranks that have left"
    )
    assert f"stager {lost + 1}/2 is lost, and no more checkpoints are taken in this job" in output
    steps = {line["step"] for line in scene.events("failed") + scene.events("declined")}
    assert STEPS_SAVED[-1] in steps, output
    # A step whose shares were all staged may become durable although a rank has not heard so.
    durable = {int(path.name[5:14]) for path in scene.files}
    assert set(STEPS_SAVED) - steps <= durable <= set(STEPS_SAVED[:-1])
    if durable:
        check_loadable(scene.files)
    for left in scene.runtime.glob(
        "mpi-segments-*"
    ):  # for the next stager, which removes what is named there
        left.unlink()
    assert_nothing_left(scene.runtime)


def test_stagers_on_two_hosts_write_one_file(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    scene = Scene(tmp_path)
    with two_hosts(tmp_path) as hosts:

        def rewrite(line: list[str]) -> list[str]:
            """The ranks over there, the first stager here, the second one over there."""
            placed = hosts.rewrite(line)
            stager = placed[placed.index(":") + 3 :]
            return [*placed, ":", "--host", f"{hosts.there}:1", *stager]

        with scene.start(RANKS, *RUN, rewrite=rewrite, env={"TRAIN_STEP_SECONDS": "0.2"}) as job:
            wait_until(lambda: _stager_among(hosts.pids()), SECONDS_MAX, job.output)
            job.succeed(SECONDS_MAX)
        assert_nothing_left(scene.runtime)
    assert len(scene.files) == len(STEPS_SAVED)
    assert {_shares(path) for path in scene.files} == {2}
    check_loadable(scene.files)


def _stager_among(pids: Sequence[int]) -> bool:
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if "stager" in psutil.Process(pid).cmdline():
                return True
    return False


def test_flushers_that_die_in_the_middle_of_their_shares_cost_nothing(tmp_path: Path) -> None:
    scene = Scene(tmp_path, TRAIN_STEP_SECONDS="0.2")
    before: dict[int, Sequence[str]] = {}
    for index in range(2):
        fired = tmp_path / f"fired-{index}"
        fired.mkdir()
        fault = f"{faultpoint.VARIABLE}=flusher@part_written#4=kill"
        before[index] = ("env", fault, f"{faultpoint.FIRED_VARIABLE}={fired}")
    with scene.start(RANKS, *RUN, rewrite=with_stagers(2, before=before)) as job:
        job.succeed(SECONDS_MAX)
    assert len(list(tmp_path.glob("fired-*/flusher*"))) == 2
    assert len(scene.files) == len(STEPS_SAVED)
    check_loadable(scene.files)


def _refused(scene: Scene, exception: type[Exception], *words: str, **more: Any) -> None:
    """See that the job does not start, that a rank says why, and that each of its processes ends."""
    with scene.start(RANKS, *RUN, **more) as job:
        assert job.wait(SECONDS_MAX) != 0, job.output()
        output = job.output()
    assert f"rank 0: {exception.__name__}: " in output, output
    for word in words:
        assert word in output, output
    assert not scene.files
    assert_nothing_left(scene.runtime)


def test_a_share_that_is_given_under_mpirun_is_refused_by_name(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "--share", "1/2")
    _refused(scene, ConfigError, "leave the setting share out", rewrite=with_stagers(2))


def test_a_lead_that_cannot_start_is_named_and_nobody_waits_for_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.store = str(tmp_path / "missing" / "run")
    words = (scene.store, "the first stager of the job could not start")
    _refused(scene, StoreError, *words, rewrite=with_stagers(2))


def test_a_lead_that_dies_before_it_has_told_the_attempt_ends_the_start_by_name(tmp_path: Path) -> None:
    dies = {0: (sys.executable, "-c", DIES_EARLY)}
    words = ("the stager of share 2/2 does not know the attempt",)
    _refused(Scene(tmp_path), PeerLost, *words, rewrite=with_stagers(2, before=dies))


def test_a_member_that_cannot_start_is_named_by_the_ranks(tmp_path: Path) -> None:
    wrong = {1: ("env", "HOLDFAST_NICENESS=99")}
    _refused(Scene(tmp_path), ConfigError, "niceness", rewrite=with_stagers(2, before=wrong))


def test_a_lead_that_lost_its_ring_ends_at_once_because_the_next_one_has_another_attempt(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path, HOLDFAST_ON_NOT_DURABLE="warn")
    with scene.start(RANKS, *RUN, str(PAUSE_AT), rewrite=with_stagers(2)) as job:
        ready = [scene.out(1) / f"paused-{rank}" for rank in range(RANKS)]
        wait_until(lambda: all(path.exists() for path in ready), SECONDS_MAX, job.output)
        ring = runtime_directory(scene.store, scene.runtime)
        flusher = int((ring / "flusher.pid").read_text().split()[0])
        os.kill(flusher, signal.SIGSTOP)  # it still writes files there
        shutil.rmtree(ring)
        os.kill(flusher, signal.SIGKILL)
        lost = "stager 1/2 is lost, and no more checkpoints are taken in this job"
        wait_until(lambda: job.output().count(lost) == RANKS, SECONDS_MAX, job.output)
        assert job.output().count("it has ended: the flusher (process") == RANKS, job.output()
        assert "heard nothing" not in job.output(), "the ranks had to wait until it was silent for long"
        (scene.out(1) / "go-on").touch()
        wait_until(lambda: scene.ended(job), SECONDS_MAX, job.output)
        job.wait(SECONDS_MAX)
    check_loadable(scene.files)
