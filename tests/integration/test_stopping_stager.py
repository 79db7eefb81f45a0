"""A standing stager gets SIGTERM under a job: it declines later steps with that cause, and keeps staged ones."""

from __future__ import annotations

import os
import signal

from holdfast.errors import PeerLost
from holdfast.ring.directory import runtime_directory
from tests.integration.test_standing_stager import MANY, scene
from tests.support.cluster import wait_until
from tests.support.standing_scene import RANKS, Scene

__all__ = ["scene"]

EVERY = 4


def declined(scene: Scene, cause: str) -> list[tuple[int, int]]:
    """Rank and step of each decline with this cause, as the ranks say it."""
    return [
        (event["rank"], event["step"])
        for event in scene.events("declined")
        if event["cause"] == cause and "rank" in event
    ]


def newest(scene: Scene, event: str) -> int:
    return max((line["step"] for line in scene.events(event) if "rank" not in line), default=-1)


def test_ranks_hear_that_the_stager_is_stopping_and_are_never_busy(scene: Scene) -> None:
    with scene.start(
        [str(MANY), str(EVERY)],
        TRAIN_STEP_SECONDS="0.02",
        TRAIN_STAGED_SECONDS_MAX="1",  # a declined step is waited for: none is on its way at the next
        HOLDFAST_CLOSE_SECONDS_MAX="1",
    ) as job:
        wait_until(lambda: newest(scene, "durable") > 0, 240, job.output)
        directory = runtime_directory(scene.cluster.store, scene.directory / "stager-runtime")
        flusher = int((directory / "flusher.pid").read_text())
        os.kill(flusher, signal.SIGSTOP)  # so that writing takes as long as the test wants
        try:
            before = newest(scene, "staged")
            wait_until(lambda: newest(scene, "staged") > before, 120, job.output)
            scene.stager.process.send_signal(signal.SIGTERM)
            wait_until(lambda: len(declined(scene, "stager stopping")) >= 3 * RANKS, 120, job.output)
        finally:
            os.kill(flusher, signal.SIGCONT)
        assert scene.stager.process.wait(120) == PeerLost.exit_code, scene.stager.output()
        wait_until(lambda: len(declined(scene, "stager lost")) >= 2 * RANKS, 120, job.output)
        job.kill()
    stopping = declined(scene, "stager stopping")
    first = min(step for _, step in stopping)
    for rank in range(RANKS):
        steps = [step for of_rank, step in stopping if of_rank == rank]
        assert steps == list(range(steps[0], steps[0] + EVERY * len(steps), EVERY)), (
            "one was taken, or not told"
        )
        # And once the stager has ended: it has said so to those that came again.
        lost = [event for event in scene.events("stager_lost") if event["rank"] == rank]
        assert len(lost) == 1
        assert "the stager is stopping" in lost[0]["message"], lost
    assert not [one for one in declined(scene, "busy") if one[1] >= first]
    # The ranks have heard of each staged step that it is durable: they were there to the end.
    staged = newest(scene, "staged")
    assert staged < first
    durable = {(line["rank"], line["step"]) for line in scene.events("durable") if "rank" in line}
    assert {(rank, staged) for rank in range(RANKS)} <= durable
    assert list((scene.directory / "store").glob(f"step-{staged:09d}*.json"))
