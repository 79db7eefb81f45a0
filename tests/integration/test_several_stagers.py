"""One file from several stagers that stand alone, on a directory and on S3: whole, equal to a single stager's, killed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.net.key import new_key
from tests.integration.jobs import train
from tests.support.cluster import Cluster, check_loadable
from tests.support.job import Job, environment
from tests.support.main_job import EVERY, STEPS
from tests.support.standing_stager import StandingProcess, standing_stager
from tests.support.torchrun import by_torchrun

RANKS = 2
NEWEST = STEPS // EVERY * EVERY - 1
STEPS_SAVED = range(EVERY - 1, STEPS, EVERY)


class Several:
    """Stagers with a share each, and jobs that name them all."""

    def __init__(self, directory: Path, store: str, stagers: list[StandingProcess], key: str) -> None:
        self.directory, self.store, self.stagers = directory, store, stagers
        self.env = {
            "HOLDFAST_STAGER": ",".join(stager.address for stager in stagers),
            "HOLDFAST_KEY": key,
            "HOLDFAST_EVENTS": str(directory / "events"),
            "TRAIN_WIDTH": "1000",
        }
        self.cluster = Cluster(directory, store, self.env, script=train.__file__)

    def start(self, *arguments: str, **env: str) -> Job:
        """A job under torchrun."""
        return self.cluster.start(RANKS, *arguments, stager=False, rewrite=by_torchrun(RANKS), env=env)

    def stop(self) -> None:
        """Until all that is staged is in the store."""
        for stager in self.stagers:
            assert stager.stop() == 0, stager.output()

    def logs(self) -> str:
        return "\n".join(stager.output() for stager in self.stagers)


@contextlib.contextmanager
def several(directory: Path, store: str, shares: int) -> Iterator[Several]:
    """So many stagers of one run on this machine; nothing of them outlives the block."""
    directory.mkdir(exist_ok=True)
    key = new_key()
    env = environment(directory / "stager-runtime", HOLDFAST_KEY=key)
    with contextlib.ExitStack() as held:
        stagers = [
            held.enter_context(
                standing_stager(
                    store, env, directory / f"stager-{number}.log", "--share", f"{number}/{shares}"
                )
            )
            for number in range(1, shares + 1)
        ]
        yield Several(directory, store, stagers, key)


def _files(store: Path) -> list[Path]:
    return sorted(store.glob("step-*.pt"))


def test_two_stagers_write_the_file_that_one_writes(tmp_path: Path) -> None:
    stores = {shares: tmp_path / f"store-{shares}" for shares in (1, 2)}
    for shares, store in stores.items():
        store.mkdir()
        with several(tmp_path / f"of-{shares}", str(store), shares) as scene:
            with scene.start(str(STEPS), str(EVERY)) as job:
                job.succeed(240)
            scene.stop()
    check_loadable(_files(stores[2]))
    names = {shares: [path.name for path in _files(store)] for shares, store in stores.items()}
    assert names[1] == names[2]
    assert len(names[2]) == len(STEPS_SAVED)
    for name in names[1]:
        assert (stores[1] / name).read_bytes() == (stores[2] / name).read_bytes(), name
    assert not list((stores[2] / ".holdfast").glob("share*/*"))
