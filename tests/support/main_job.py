"""The training that many tests kill, and its uninterrupted run, which they compare with."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tests.integration.jobs import train
from tests.support.cluster import Cluster

__all__ = ["EVERY", "PAUSE_AT", "RUN", "SAVED", "STEPS", "Finished", "finish"]

STEPS, EVERY, PAUSE_AT, SAVED = 14, 4, 9, 7
RUN = (str(STEPS), str(EVERY))


class Finished(NamedTuple):
    """A run on two ranks that ended by itself: its store, and the ranks' output."""

    store: Path
    out: Path

    @classmethod
    def of(cls, directory: Path) -> Finished:
        """The run that `finish` left here."""
        return cls(directory / "store", _cluster(directory).out(1))


def finish(directory: Path) -> None:
    """Train through."""
    cluster = _cluster(directory)
    with cluster.start(2, *RUN) as job:
        job.succeed(120)
    cluster.wait_for_flusher()


def _cluster(directory: Path) -> Cluster:
    return Cluster(directory, str(directory / "store"), {}, script=train.__file__)
