"""Bad input is refused before training begins, with names and a cause, and leaves nothing behind."""

from __future__ import annotations

import json
import platform
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoints.catalog import Catalog
from holdfast.errors import ConfigError, HoldfastError, StoreError
from holdfast.image.manifest import State
from holdfast.store import open_store
from tests.integration.jobs import guarded
from tests.support.cluster import SMALL, Cluster, assert_nothing_left, wait_until
from tests.support.job import HOLDFAST, Job, environment
from tests.support.s3_place import S3Place, plain_client
from trainer_side.tiers.tier_directory import RankLock, TierDirectory

pytestmark = [pytest.mark.mpi]
RANKS = 2
SECONDS_MAX = 200


def cluster_on(directory: Path, store: str, **env: str) -> Cluster:
    return Cluster(directory, store, env, script=guarded.__file__, stager=SMALL)


def said(cluster: Cluster, number: int) -> list[dict[str, Any]]:
    """Return the last record of each rank of a start."""
    return [json.loads((cluster.out(number) / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


def check_refused(cluster: Cluster, job: Job, number: int, error: str, words: tuple[str, ...]) -> None:
    """The job failed; the scripts of all ranks and the log name the cause; no step ran; the machine is clean."""
    code = job.wait(SECONDS_MAX)
    output = job.output()
    assert code != 0, output
    for rank in said(cluster, number):
        assert rank["start"] is None, "restore() came back"
        assert rank["taken"] == [], "a training step was taken"
        assert rank["error"]["class"] == error, rank
        for word in words:
            assert word in rank["error"]["message"], rank
    for word in words:
        assert word in re.sub(r"\s+", " ", output), output
    assert_nothing_left(cluster.runtime)


# -- a store that cannot be used ----------------------------------------------------------------------------


def refusal_of_the_stager(
    directory: Path, store: str, error: type[HoldfastError], words: tuple[str, ...], **env: str
) -> str:
    """Return the stager's last output, after checking its exit code and leftovers; test_story checks the ranks."""
    line = [HOLDFAST, "stager", "--store", store, "--listen", "127.0.0.1:0", *SMALL]
    runtime = directory / "runtime"
    done = subprocess.run(
        line,
        env=environment(runtime, **env),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == error.exit_code, done.stderr
    for word in words:
        assert word in re.sub(r"\s+", " ", done.stderr), done.stderr
    assert not list(runtime.glob("*/journal")), "a flusher is left"
    return done.stderr


def test_an_unknown_scheme(tmp_path: Path) -> None:
    refusal_of_the_stager(tmp_path, "gopher://server/run", ConfigError, ("gopher://server/run", "gopher"))


@pytest.mark.s3
def test_a_missing_bucket(tmp_path: Path, swift_s3: S3Place) -> None:
    store = f"s3://{swift_s3.bucket}-other/run"
    refusal_of_the_stager(tmp_path, store, StoreError, (store, "bucket"))
    client = plain_client()
    try:
        buckets = [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]
    finally:
        client.close()
    assert f"{swift_s3.bucket}-other" not in buckets, "it made the bucket"


@pytest.mark.s3
def test_wrong_credentials(tmp_path: Path, swift_s3: S3Place) -> None:
    secret = "not-the-secret-key"
    words = (swift_s3.url(), "SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY")
    said = refusal_of_the_stager(tmp_path, swift_s3.url(), StoreError, words, AWS_SECRET_ACCESS_KEY=secret)
    assert secret not in said
    client = plain_client()
    try:
        assert not client.list_objects_v2(Bucket=swift_s3.bucket).get("Contents")
    finally:
        client.close()


# -- local tiers of one rank ---------------------------------------------------------------------------------


def test_a_rank_without_tiers_is_refused_by_name(tmp_path: Path) -> None:
    check_a_rank_without_tiers(tmp_path, stager=False)


def check_a_rank_without_tiers(tmp_path: Path, *, stager: bool) -> None:
    env = {"HOLDFAST_TIERS": f"file:{tmp_path}", "HOLDFAST_STORE": str(tmp_path / "store")}
    cluster = cluster_on(tmp_path, str(tmp_path / "store"), **env)
    with cluster.start(RANKS, "untiered", "2", stager=stager) as job:
        check_refused(cluster, job, 1, "ConfigError", ("setting tiers: rank 1 has none, rank 0 has [",))


def test_a_tier_that_one_rank_cannot_use_ends_the_first_save_of_all(tmp_path: Path) -> None:
    """Another process writes rank 1's slices into the tier."""
    store = str(tmp_path / "store")
    place = TierDirectory(tmp_path / "tier", store)
    place.make()
    lock = RankLock(place, 1)
    env = {"HOLDFAST_TIERS": f"file:{tmp_path / 'tier'}", "HOLDFAST_STORE": store}
    cluster = cluster_on(tmp_path, store, **env)
    try:
        with cluster.start(RANKS, "plain", "2", stager=False) as job:
            assert job.wait(SECONDS_MAX) != 0
        for rank in said(cluster, 1):
            assert rank["taken"] == [0], "training went on"
            assert rank["error"]["class"] == "ConfigError"
            assert "is writing the slices of rank 1" in rank["error"]["message"]
        assert "rank 1: " in said(cluster, 1)[0]["error"]["message"]
    finally:
        lock.release()


# -- two writers --------------------------------------------------------------------------------------------


def check_a_second_stager_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    check_a_second_stager(tmp_path, beside=True)


def check_a_second_stager(tmp_path: Path, *, beside: bool) -> None:
    """Start a second job on the same store; `beside`: in the same runtime directory."""
    cluster = cluster_on(tmp_path, str(tmp_path / "store"))
    with cluster.start(RANKS, "hold", "3") as first:
        runtime = cluster.runtime
        held = [cluster.out(1) / f"holding-{rank}" for rank in range(RANKS)]
        wait_until(lambda: all(path.exists() for path in held), SECONDS_MAX, first.output)
        with cluster.start(RANKS, "plain", "2", runtime=runtime if beside else None) as second:
            assert second.wait(SECONDS_MAX) != 0, second.output()
        for rank in said(cluster, 2):
            assert (rank["start"], rank["taken"]) == (None, [])
            assert rank["error"]["class"] == "FencedError", rank
            named = re.search(r"process (\d+)", rank["error"]["message"])
            assert named, rank
            for words in (cluster.store, f"on {platform.node()}", "Wait for it or end it"):
                assert words in rank["error"]["message"]
            assert is_of(int(named[1]), runtime), f"{named[0]} is not of the first job"
        if not beside:
            assert_nothing_left(cluster.runtime)
        assert first.process.poll() is None, first.output()
        (cluster.out(1) / "go").touch()
        first.succeed(SECONDS_MAX)
    for rank in said(cluster, 1):
        assert (rank["taken"], rank["error"]) == ([0, 1, 2], None)
    assert_nothing_left(runtime)
    items = Catalog(open_store(cluster.store)).list()
    assert [(item.step, item.state) for item in items] == [(step, State.VERIFIED) for step in (2, 1, 0)]
    claims = [path.name for path in (tmp_path / "store" / ".holdfast").glob("writer-*")]
    assert claims == ["writer-000001.json"], "the second one wrote a claim"


def is_of(pid: int, runtime: Path) -> bool:
    """Whether a process runs and belongs to the simulated machine with this `runtime`."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return f"HOLDFAST_RUNTIME_DIR={runtime}".encode() in variables


# -- states that cannot be saved ----------------------------------------------------------------------------


def check_ranks_with_different_layouts(tmp_path: Path) -> None:
    cluster = cluster_on(tmp_path, str(tmp_path / "store"))
    with cluster.start(RANKS, "layouts", "2") as job:
        assert job.wait(SECONDS_MAX) != 0, job.output()
    for rank in said(cluster, 1):
        assert rank["error"]["class"] == "StateError", rank
        for words in ("rank 1", "model/1.weight", "expected (float32 [20, 50]", "got (float32 [30, 50]"):
            assert words in rank["error"]["message"]
    check_empty_run(cluster)


def test_a_state_of_one_rank_that_weights_only_cannot_load_ends_the_job(tmp_path: Path) -> None:
    """The other rank does not hang, and nothing is published."""
    cluster = cluster_on(tmp_path, str(tmp_path / "store"))
    with cluster.start(RANKS, "numpy-rank-0", "2") as job:
        assert job.wait(SECONDS_MAX) != 0, job.output()
        output = job.output()
    refused, other = said(cluster, 1)
    assert refused["error"]["class"] == "StateError", refused
    assert "extra/history/2 is numpy.ndarray" in refused["error"]["message"]
    assert "extra/history/2 is numpy.ndarray" in output
    assert other["taken"] == [0, 1], "checkpoints never stop a rank that trains"
    assert other["error"]["class"] == "NotDurable", "and its end says that it has none"
    # The first message depends on whether the other rank's offer or its good-bye arrives first.
    assert re.search(r"step [01](:| is declined: no checkpoint can be whole:) rank 0 has left", output), (
        output
    )
    assert (refused["durable"], other["durable"]) == (-1, -1)
    check_empty_run(cluster)


def test_rank_0_alone_calls_step(tmp_path: Path) -> None:
    """A script with `if rank == 0: checkpointer.step(step)` ends with advice instead of hanging."""
    stager = (*SMALL, "--offer-seconds-max", "2")
    cluster = Cluster(tmp_path, str(tmp_path / "store"), {}, script=guarded.__file__, stager=stager)
    with cluster.start(RANKS, "rank-0-alone", "2") as job:
        assert job.wait(SECONDS_MAX) != 0, job.output()
        output = job.output()
    error = said(cluster, 1)[0]["error"]
    assert error["class"] == "PeerLost"
    assert "rank 1 did not join a save() started by other ranks" in output
    assert "the stager is lost" not in output
    for words in ("waited 2 s for the layout of rank 1", "Every rank must call step() or save()"):
        assert words in error["message"]
    check_empty_run(cluster)


def check_empty_run(cluster: Cluster) -> None:
    """No checkpoint, no temporary file; the machine is clean."""
    assert_nothing_left(cluster.runtime, SECONDS_MAX)
    store = Path(cluster.store)
    assert [path for path in store.rglob("*") if path.is_file()] == [
        store / ".holdfast" / "writer-000001.json"
    ]


# -- a store with damage ------------------------------------------------------------------------------------


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def change_sum(path: Path) -> None:
    """Replace a checksum in the manifest, which stays valid JSON but describes another file."""
    document = json.loads(path.read_text())
    document["chunk_crc32s"][0] ^= 1
    path.write_text(json.dumps(document))


DAMAGE: list[tuple[str, Callable[[Path], None]]] = [
    ("step-000000006.json", halve),
    ("step-000000005.json", flip),
    ("step-000000004.json", change_sum),
    ("step-000000003.pt", halve),
    ("step-000000002.pt", flip),
    ("step-000000001.pt", Path.unlink),
]


def check_restore_passes_over_every_kind_of_damage_with_the_reason(tmp_path: Path) -> None:
    store = tmp_path / "store"
    cluster = cluster_on(tmp_path, str(store))
    with cluster.start(RANKS, "plain", "7") as job:
        job.succeed(SECONDS_MAX)
    cluster.wait_for_flusher()
    for name, damage in DAMAGE:
        damage(store / name)

    with cluster.start(RANKS, "plain", "2") as job:
        job.succeed(SECONDS_MAX)
        output = job.output()
    for rank in said(cluster, 2):
        assert (rank["start"], rank["mark"], rank["taken"]) == (1, [0.0], [1])
        assert len(rank["skipped"]) == len(DAMAGE)
        for (name, _), reason in zip(DAMAGE, rank["skipped"], strict=True):
            assert re.search(rf"step-0*{name[13]}\b|step {name[13]}\b", reason), (name, reason)
            assert reason in output, "the log does not say it"
    cluster.wait_for_flusher()
    newest = next(
        item for item in Catalog(open_store(str(store))).list() if item.step == 1
    )  # from two attempts
    assert newest.state == State.VERIFIED, "the step that was taken again is not a good one"

    for path in store.glob("*.pt"):
        halve(path)
    with cluster.start(RANKS, "plain", "9") as job:
        code = job.wait(SECONDS_MAX)
        output = job.output()
    assert code != 0, output
    for rank in said(cluster, 3):
        assert rank["taken"] == []
        assert rank["error"]["class"] == "DamageError"
        for step in range(7):
            assert re.search(rf"step-0*{step}\b|step {step}\b", rank["error"]["message"]), (step, rank)
    assert_nothing_left(cluster.runtime, SECONDS_MAX)
