"""The main job on S3, with images of several parts: killed on a real Swift, compared with a run on another server."""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path
from typing import NamedTuple, cast

import pytest

from holdfast.checkpoints.catalog import Catalog, CatalogItem
from holdfast.image.manifest import State
from holdfast.store import open_store
from holdfast.store.retrying import Retrying
from holdfast.store.s3_upload import part_bytes_for
from tests.integration.jobs import train
from tests.support.cluster import Cluster, check_continued, check_loadable, kill_ranks, load
from tests.support.job import HOLDFAST
from tests.support.s3_place import S3Place, fresh_bucket, plain_client, s3_environment

pytestmark = [pytest.mark.mpi, pytest.mark.s3]

STEPS, EVERY, SAVED, KILLED_AT = 14, 4, 7, 11
RUN = (str(STEPS), str(EVERY))
CHUNK_BYTES = 1 << 20  # a part of 5 MiB is five chunks
SETTINGS = ("--chunk-bytes", "1MiB", "--ring-bytes", "16MiB", "--keep-last", "0")
WIDTH = {"TRAIN_WIDTH": "60000"}
IMAGE_BYTES_MIN = 20 << 20  # larger than the ring, and at least four parts


class Finished(NamedTuple):
    """A finished, uninterrupted run."""

    place: S3Place
    out: Path


@pytest.fixture(scope="module")
def uninterrupted(moto_endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Run without a kill, on moto: the reference for the killed run, and a test of its own."""
    env = s3_environment(moto_endpoint, "testing", "testing")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        place = S3Place("moto", moto_endpoint, fresh_bucket(), env)
        cluster = _cluster(tmp_path_factory.mktemp("uninterrupted"), place)
        with cluster.start(2, *RUN) as job:
            job.succeed(120)
        cluster.wait_for_flusher()
    return Finished(place, cluster.out(1))


def _cluster(directory: Path, place: S3Place) -> Cluster:
    env = {**place.environment, **WIDTH}
    return Cluster(directory, place.url("team/run"), env, script=train.__file__, stager=SETTINGS)


def published(place: S3Place) -> list[CatalogItem]:
    """Return the items of the run's catalog."""
    with contextlib.closing(cast(Retrying, open_store(place.url("team/run")))) as store:
        return list(Catalog(store).list())


def check_bucket(place: S3Place, steps: set[int]) -> list[CatalogItem]:
    """The bucket has exactly these complete steps, each with its manifest, and the claims; no upload is open."""
    items = published(place)
    assert {item.step for item in items} == steps
    client = plain_client()
    try:
        listed = client.list_objects_v2(Bucket=place.bucket)
        assert not listed["IsTruncated"]
        keys = {found["Key"] for found in listed["Contents"]}
        claims = {key for key in keys if key.startswith("team/run/.holdfast/writer-")}
        assert claims
        files = [item.manifest.file for item in items if item.manifest is not None]
        assert {int(name[5:14]) for name in files} == steps
        whole = {f"team/run/{name[:-2]}{end}" for name in files for end in ("pt", "json")}
        proofs = {f"team/run/{name[:-2]}proof.json" for name in files}
        assert whole <= keys - claims <= whole | proofs
        assert not client.list_multipart_uploads(Bucket=place.bucket).get("Uploads")
        for key in claims:
            claim = json.loads(client.get_object(Bucket=place.bucket, Key=key)["Body"].read())
            assert claim["released"], "the flusher left without saying so"
        for item in items:
            assert item.manifest is not None, item.fault
            image_bytes = item.manifest.image_bytes
            assert image_bytes > IMAGE_BYTES_MIN
            assert item.manifest.chunk_bytes == CHUNK_BYTES
            head = client.head_object(Bucket=place.bucket, Key=f"team/run/{item.manifest.file}")
            assert head["ContentLength"] == image_bytes
            parts = -(-image_bytes // part_bytes_for(image_bytes, CHUNK_BYTES))
            assert parts > 3
            assert head["ETag"].strip('"').endswith(f"-{parts}"), "it was not written in parts"
    finally:
        client.close()
    return items


def pull_all(place: S3Place, steps: set[int], destination: Path) -> list[Path]:
    """Run `holdfast pull` for every step."""
    destination.mkdir()
    pulled = []
    for step in sorted(steps):
        path = destination / f"{step}.pt"
        subprocess.run([HOLDFAST, "pull", f"{place.url('team/run')}@{step}", str(path)], check=True)
        pulled.append(path)
    assert set(destination.iterdir()) == set(pulled), "something else was left beside the files"
    return pulled


def test_a_killed_run_continues_bit_for_bit_from_swift(
    uninterrupted: Finished, swift_s3: S3Place, tmp_path: Path
) -> None:
    """The ranks are killed right after a save: that checkpoint is either complete in the store or absent."""
    cluster = _cluster(tmp_path, swift_s3)
    with cluster.start(2, *RUN, str(KILLED_AT)) as job:
        kill_ranks(cluster, job, 2, 1, saved=SAVED)
        job.wait(60)
    cluster.wait_for_flusher()
    newest = max(item.step for item in published(swift_s3))
    assert newest in {SAVED, KILLED_AT}
    check_bucket(swift_s3, set(range(EVERY - 1, newest + 1, EVERY)))

    with cluster.start(2, *RUN) as job:
        job.succeed(120)
    cluster.wait_for_flusher()
    check_continued(uninterrupted.out, cluster, 1, 2, start=newest + 1, steps=STEPS)
    steps = {3, 7, 11}
    items = check_bucket(swift_s3, steps)
    assert all(item.state == State.VERIFIED for item in items)
    pulled = pull_all(swift_s3, steps, tmp_path / "pulled")
    check_loadable(pulled)
    assert load(pulled[0])["model"]["module.0.weight"].shape == (int(WIDTH["TRAIN_WIDTH"]), train.FEATURES)
