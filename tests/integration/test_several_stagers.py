"""One file from several standing stagers, on a directory and on S3: complete, with equal bytes, also after kills."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.errors import PeerLost
from holdfast.net.key import new_key
from tests.integration.jobs import drifting, train
from tests.support.cluster import Cluster, check_continued, check_loadable, same, wait_until
from tests.support.events import read_events
from tests.support.job import Job, environment
from tests.support.main_job import EVERY, PAUSE_AT, RUN, SAVED, STEPS, Finished
from tests.support.s3_place import S3Place, plain_client
from tests.support.standing_stager import StandingProcess, standing_stager
from tests.support.torchrun import by_torchrun

RANKS = 2
MANY = 100_000
RING = "the stager's ring"
STEPS_SAVED = range(EVERY - 1, STEPS, EVERY)


class Several:
    """Stagers with a share each, and jobs that use all of them."""

    def __init__(
        self,
        directory: Path,
        store: str,
        begin: Callable[[int, str], StandingProcess],
        shares: int,
        more: dict[str, str],
    ) -> None:
        self.directory, self.store, self._begin, self.shares = directory, store, begin, shares
        self.stagers = [begin(index, "127.0.0.1:0") for index in range(shares)]
        self.env = {
            "HOLDFAST_STAGER": ",".join(stager.address for stager in self.stagers),
            "HOLDFAST_EVENTS": str(directory / "events"),
            "HOLDFAST_RECONNECT_SECONDS_MAX": "2",
            "TRAIN_STAGED_SECONDS_MAX": "10",
            "TRAIN_WIDTH": "1000",
            **more,
        }
        self.cluster = Cluster(directory, store, self.env, script=train.__file__)

    def start(self, *arguments: str, **env: str) -> Job:
        """Start a job under torchrun."""
        return self.cluster.start(RANKS, *arguments, stager=False, rewrite=by_torchrun(RANKS), env=env)

    def stop(self) -> None:
        """Stop the stagers once all staged checkpoints are in the store."""
        for stager in self.stagers:
            assert stager.stop() in {0, PeerLost.exit_code}, stager.output()

    def again(self, index: int) -> None:
        """Start the stager with this share again, at the same address."""
        self.stagers[index] = self._begin(index, self.stagers[index].address)

    def logs(self) -> str:
        return "\n".join(stager.output() for stager in self.stagers)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the ranks' events of this kind."""
        return [line for line in read_events(self.directory / "events") if line["event"] == kind]

    def of_step(self, step: int, *kinds: str) -> list[dict[str, Any]]:
        """Return the ranks' events of one step and several kinds."""
        return [line for kind in kinds for line in self.events(kind) if line["step"] == step]

    def wait_for_pause(self, job: Job, store: Path) -> None:
        """Wait until all ranks pause, and step SAVED is in the store."""

        def ready() -> bool:
            assert job.process.poll() is None, job.output()
            paused = all((self.cluster.out(1) / f"paused-{rank}").exists() for rank in range(RANKS))
            return paused and any(store.glob(f"step-{SAVED:09d}*.json"))

        wait_until(
            ready, 240, lambda: f"no pause with step {SAVED} in the store:\n{job.output()}{self.logs()}"
        )


@contextlib.contextmanager
def several(
    directory: Path,
    store: str,
    shares: int,
    settings: Sequence[str] = (),
    faults: Mapping[int, str] | None = None,
    **more: str,
) -> Iterator[Several]:
    """Run several stagers of one run on this machine during the block.

    `faults`: by index, for a stager and its flusher. `more`: settings of the jobs.
    """
    directory.mkdir(exist_ok=True)
    key = new_key()
    env = environment(directory / "stager-runtime", HOLDFAST_KEY=key)
    with contextlib.ExitStack() as held:

        def begin(index: int, listen: str) -> StandingProcess:
            number = len(list(directory.glob("stager-*.log")))
            log, share = directory / f"stager-{number}.log", f"{index + 1}/{shares}"
            own = {**env, "HOLDFAST_FAULT_FIRED": str(directory / f"fired-{index}")}
            (directory / f"fired-{index}").mkdir(exist_ok=True)
            if faults and index in faults:
                own["HOLDFAST_FAULT"] = faults[index]
            return held.enter_context(
                standing_stager(store, own, log, "--share", share, *settings, listen=listen)
            )

        yield Several(directory, store, begin, shares, {"HOLDFAST_KEY": key, **more})


def _files(store: Path) -> list[Path]:
    return sorted(store.glob("step-*.pt"))


def _names(place: S3Place) -> list[str]:
    client = plain_client()
    try:
        listed = client.list_objects_v2(Bucket=place.bucket).get("Contents", [])
        return [item["Key"] for item in listed]
    finally:
        client.close()


def _fetched(place: S3Place, directory: Path) -> list[Path]:
    """Return the bucket's checkpoints, as files."""
    directory.mkdir()
    client, found = plain_client(), []
    try:
        for name in _names(place):
            if name.endswith(".pt"):
                found.append(directory / name.rpartition("/")[2])
                client.download_file(place.bucket, name, str(found[-1]))
    finally:
        client.close()
    return found


def _newest(store: Path) -> int:
    return max((int(path.name[5:14]) for path in _files(store)), default=-1)


def _left_of_shares(store: Path) -> list[Path]:
    return [path for path in (store / ".holdfast").rglob("*") if path.is_file() and "share" in str(path)]


def test_two_stagers_write_the_file_that_one_writes(tmp_path: Path) -> None:
    stores = {shares: tmp_path / f"store-{shares}" for shares in (1, 2)}
    for shares, store in stores.items():
        store.mkdir()
        with several(tmp_path / f"of-{shares}", str(store), shares) as scene:
            with scene.start(*RUN) as job:
                job.succeed(240)
            scene.stop()
    check_loadable(_files(stores[2]))
    names = {shares: [path.name for path in _files(store)] for shares, store in stores.items()}
    assert names[1] == names[2]
    assert len(names[2]) == len(STEPS_SAVED)
    for name in names[1]:
        assert (stores[1] / name).read_bytes() == (stores[2] / name).read_bytes(), name
    assert not _left_of_shares(stores[2])


def test_two_stagers_write_one_object_to_s3(tmp_path: Path, swift_s3: S3Place) -> None:
    # An S3 upload's part has at least 5 MiB, so a smaller image has one share.
    settings = ("--ring-bytes", "16MiB")
    with several(tmp_path / "scene", swift_s3.url(), 2, settings, TRAIN_WIDTH="40000") as scene:
        with scene.start(*RUN) as job:
            job.succeed(240)
        scene.stop()
    files = _fetched(swift_s3, tmp_path / "fetched")
    assert len(files) == len(STEPS_SAVED)
    check_loadable(files)
    assert not [name for name in _names(swift_s3) if "share" in name]


def test_a_job_resumes_from_the_rings_of_two_stagers(tmp_path: Path, reference: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    with several(tmp_path / "scene", str(store), 2, TRAIN_WIDTH="64") as scene:
        with scene.start(*RUN, str(PAUSE_AT)) as job:
            scene.wait_for_pause(job, store)
            job.kill()
        with scene.start(*RUN) as job:
            job.succeed(240)
        check_continued(reference, scene.cluster, 1, 2, start=SAVED + 1, steps=STEPS)
        restores = scene.events("restore")
        assert [event["step"] for event in restores] == [SAVED] * RANKS
        assert all(set(event["sources"]) == {RING} for event in restores), restores
        scene.stop()
    check_loadable(_files(store))


@pytest.mark.parametrize("point", ["chunk_received#14", "chunk_full#14", "staged#2"])
@pytest.mark.parametrize("killed", [0, 1], ids=["lead", "member"])
def test_a_stager_that_dies_and_is_started_again_is_sent_its_share_of_the_same_step(
    tmp_path: Path, finished: Finished, killed: int, point: str
) -> None:
    fault = {killed: f"stager@{point}=kill"}  # of the second checkpoint
    with _of_small_chunks(tmp_path, fault) as scene:
        with scene.start(*RUN, TRAIN_STAGED_SECONDS_MAX="60") as job:
            scene.stagers[killed].process.wait(240)
            wait_until(lambda: len(scene.events("stager_lost")) == RANKS, 120, job.output)
            scene.again(killed)
            job.succeed(240)
        scene.stop()
    _check_nothing_was_lost(scene, finished)


def test_a_lead_that_dies_before_another_share_is_staged_goes_on_with_the_step(
    tmp_path: Path, finished: Finished
) -> None:
    fault = {0: "stager@staged#2=kill", 1: "stager@chunk_full#14=stop"}
    step = STEPS_SAVED[1]
    with _of_small_chunks(tmp_path, fault) as scene:
        with scene.start(*RUN, TRAIN_STAGED_SECONDS_MAX="60") as job:
            scene.stagers[0].process.wait(240)
            wait_until(lambda: len(scene.events("stager_lost")) == RANKS, 120, job.output)
            scene.again(0)
            wait_until(lambda: len(scene.events("stager_back")) == RANKS, 120, job.output)
            assert not scene.of_step(step, "staged", "durable")
            scene.stagers[1].process.send_signal(signal.SIGCONT)
            job.succeed(240)
        scene.stop()
    assert len(scene.of_step(step, "staged")) == RANKS
    _check_nothing_was_lost(scene, finished)


def _of_small_chunks(directory: Path, fault: dict[int, str]) -> contextlib.AbstractContextManager[Several]:
    store = directory / "store"
    store.mkdir()
    fine = ("--chunk-bytes", "8KiB")
    return several(directory / "scene", str(store), 2, fine, fault, TRAIN_WIDTH="64")


def _check_nothing_was_lost(scene: Several, finished: Finished) -> None:
    """One stager was lost once, and is back; no step was lost."""
    store = Path(scene.store)
    assert len(scene.events("stager_lost")) == len(scene.events("stager_back")) == RANKS
    assert {line["attempt"] for line in scene.events("stager_back")} == {1}
    # When a stager is lost, a rank counts a staged step as failed unless it has heard that it is durable.
    ended = scene.events("failed") + scene.events("declined")
    assert {line["step"] for line in ended} <= {STEPS_SAVED[0]}
    assert [int(path.name[5:14]) for path in _files(store)] == list(STEPS_SAVED)
    check_loadable(_files(store))
    for path in _files(store):
        one = finished.store / path.name
        assert same(*(torch.load(file, weights_only=True) for file in (path, one))), path.name
    assert not _left_of_shares(store)


@pytest.mark.parametrize("killed", [0, 1], ids=["lead", "member"])
def test_a_stager_that_dies_in_the_middle_of_its_share_costs_that_step_and_is_saved_to_again_once_back(
    tmp_path: Path, killed: int
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    fault = {killed: "stager@chunk_received#5=kill"}  # in the second checkpoint
    with several(tmp_path / "scene", str(store), 2, faults=fault) as scene:
        arguments = (str(MANY), str(EVERY))
        with scene.start(*arguments, TRAIN_STEP_SECONDS="0.05", HOLDFAST_ON_NOT_DURABLE="warn") as job:
            scene.stagers[killed].process.wait(240)
            wait_until(
                lambda: len(scene.events("failed") + scene.events("declined")) >= RANKS, 120, job.output
            )
            cost, *_ = ended = scene.events("failed") or scene.events("declined")
            assert {line["step"] for line in ended} == {cost["step"]}
            names = (f"share {killed + 1}, on ", f"stager {killed + 1}/2", scene.stagers[killed].address)
            assert all(any(name in line["reason"] for name in names) for line in ended), ended
            scene.again(killed)
            wait_until(lambda: bool(scene.events("stager_back")), 120, job.output)
            newest = _newest(store)
            wait_until(lambda: _newest(store) > newest, 240, lambda: job.output() + scene.logs())
            assert not scene.of_step(cost["step"], "staged", "durable")
            job.kill()
        scene.stop()
    check_loadable(_files(store))
    assert not list(store.glob(f"step-{cost['step']:09d}*"))


def test_flushers_that_die_in_the_middle_of_their_shares_cost_nothing(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    fault = "flusher@part_written#5=kill"
    with several(tmp_path / "scene", str(store), 2, faults={0: fault, 1: fault}) as scene:
        with scene.start(*RUN, TRAIN_STEP_SECONDS="0.2") as job:
            job.succeed(240)
        assert len(list((tmp_path / "scene").glob("fired-*/flusher*"))) == 2
        scene.stop()
    assert len(_files(store)) == len(STEPS_SAVED)
    check_loadable(_files(store))


def test_a_step_with_all_shares_staged_becomes_durable_without_the_ranks(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    with several(tmp_path / "scene", str(store), 2) as scene:
        with scene.start(*RUN, str(PAUSE_AT)) as job:
            wait_until(lambda: bool(scene.of_step(SAVED, "staged")), 240, job.output)
            job.kill()
        wait_until(lambda: any(f"step-{SAVED:09d}" in path.name for path in _files(store)), 120, scene.logs)
        scene.stop()
    check_loadable(_files(store))


def test_stagers_that_are_named_in_another_order_are_refused_by_name(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    with several(tmp_path / "scene", str(store), 2) as scene:
        first, second = (stager.address for stager in scene.stagers)
        for named, words in (
            (f"{second},{first}", "name the stagers in HOLDFAST_STAGER in the order of their shares"),
            (first, "expected the stager with share 1/1, got share 1/2"),
        ):
            with scene.start(*RUN, HOLDFAST_STAGER=named) as job:
                assert job.wait(240) != 0
                assert words in job.output()


def test_two_names_of_one_stager_are_refused_by_name(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    with several(tmp_path / "scene", str(store), 2) as scene:
        first = scene.stagers[0].address
        named = f"{first},{first.replace('127.0.0.1', 'localhost')}"
        with scene.start(*RUN, HOLDFAST_STAGER=named) as job:
            assert job.wait(240) != 0
            assert "take the stager with share 1/2 for one after the first" in job.output()


def test_a_rank_that_drifts_is_found_although_it_sends_the_first_stager_nothing(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    steps, settings = 6, ("--on-divergence", "refuse")
    with several(tmp_path / "scene", str(store), 2, settings, HOLDFAST_ON_NOT_DURABLE="warn") as scene:
        cluster = Cluster(scene.directory, scene.store, scene.env, script=drifting.__file__)
        arguments = ("element", str(steps))
        with cluster.start(RANKS, *arguments, stager=False, rewrite=by_torchrun(RANKS)) as job:
            job.succeed(240)
        scene.stop()
        assert "replicas have drifted apart" in scene.logs()
    assert [int(path.name[5:14]) for path in _files(store)] == list(range(drifting.DRIFT_AT))
