"""Ranks write slices to a real Swift through a proxy that breaks requests, and a file is made of them through it too.

Asked each time: the file is equal to the byte; nothing twice, no open upload; nothing tried without end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

import pytest

from holdfast.checkpoints.assembly import assemble
from holdfast.checkpoints.slice_sets import find_sets, load_set, remove_set, remove_stale
from holdfast.errors import StoreError
from holdfast.image.manifest import Manifest, manifest_name
from holdfast.store import open_store
from holdfast.store.retrying import RetryBudget, Retrying
from tests.support.fault_proxy import Fault, FaultProxy, Rule, running_proxy
from tests.support.images import Image, made_up
from tests.support.s3_place import S3Place, plain_client
from tests.support.store_slices import tier_of, write_frames, write_slices

pytestmark = pytest.mark.s3

BUDGET = RetryBudget(attempts_max=8, first_wait_seconds=0.01, wait_seconds_max=0.1)


class Faulty(NamedTuple):
    """A bucket on a real server, the proxy before it, and the run through it."""

    place: S3Place
    proxy: FaultProxy
    store: Retrying


@pytest.fixture
def faulty(swift_s3: S3Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    with running_proxy(swift_s3.endpoint, seed=3) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = Retrying(cast(Retrying, open_store(swift_s3.url("team/run"))).inner, budget=BUDGET)
        yield Faulty(swift_s3, proxy, store)
        store.close()


@pytest.fixture(scope="module")
def image() -> Image:
    """Two ranks; the slice of each is more than one part of an upload."""
    return made_up(8, entries=40, chunk_bytes=1 << 20, ranks=2, entry_bytes_max=4 << 20)


def nothing() -> None:
    pass


def objects(faulty: Faulty) -> set[str]:
    """On the server itself, past the proxy; and no upload is open."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", faulty.place.endpoint)
        client = plain_client()
    try:
        assert not client.list_multipart_uploads(Bucket=faulty.place.bucket).get("Uploads")
        listed = client.list_objects_v2(Bucket=faulty.place.bucket).get("Contents", [])
        return {found["Key"].removeprefix("team/run/") for found in listed}
    finally:
        client.close()


def make(faulty: Faulty, image: Image) -> Manifest:
    """Write, assemble, clear away; the one way that all the faults lie on."""
    write_slices(faulty.store, image, attempt=1, step=7)
    (found,) = find_sets(faulty.store.list())
    manifest = assemble(faulty.store, load_set(faulty.store, found), attempt=9, check=nothing)
    remove_set(faulty.store, found)
    remove_stale(faulty.store, 2)
    return manifest


RULES = {
    "every part once": [Rule(Fault.RESET_MIDWAY, "UploadPart", first=n, times=1) for n in (1, 3, 5)],
    "lost answers to Complete": [Rule(Fault.LOST_ANSWER, "CompleteMultipartUpload", times=2)],
    "409 and errors in 200": [
        Rule(Fault.CONFLICT, "CompleteMultipartUpload"),
        Rule(Fault.ERROR_IN_200, "CompleteMultipartUpload", first=2),
    ],
    "lost answers to seals": [Rule(Fault.LOST_ANSWER, "PutObject", key=".seal.json", times=2)],
    "lost answers to the layout": [Rule(Fault.LOST_ANSWER, "PutObject", key=".layout")],
    "truncated and wrong reads": [
        Rule(Fault.TRUNCATED, "GetObject", key=".slice", times=2),
        Rule(Fault.WRONG_BYTE, "GetObject", key=".slice", first=5, times=1),
    ],
    "slow down": [Rule(Fault.SLOW_DOWN, times=6), Rule(Fault.INTERNAL_ERROR, first=20, times=3)],
    "one in ten": [Rule(Fault.RESET_BEFORE, times=None, probability=0.1)],
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
def test_slices_and_their_file_get_through(faulty: Faulty, image: Image, rules: list[Rule]) -> None:
    faulty.proxy.add(*rules)
    manifest = make(faulty, image)
    assert faulty.store.read(manifest.file) == image.final
    assert objects(faulty) == {manifest.file, manifest_name(manifest.file)}
    assert any(request.fault for request in faulty.proxy.requests())


def test_a_store_that_never_takes_a_seal_has_no_slice_and_no_upload(faulty: Faulty, image: Image) -> None:
    faulty.proxy.add(Rule(Fault.INTERNAL_ERROR, "PutObject", key=".seal.json", times=None))
    tier = tier_of(faulty.store, image, 0)
    writer = tier.begin(1, 7)
    assert writer is not None
    write_frames(writer, image, 0)
    with pytest.raises(StoreError, match="given up after 8 attempts"):
        writer.seal({})
    writer.abandon()
    tried = [request for request in faulty.proxy.requests() if request.key.endswith(".seal.json")]
    assert len([request for request in tried if request.operation == "PutObject"]) <= 8 * 4
    assert {name for name in objects(faulty) if not name.endswith(".layout")} == set()
    assert tier.begin(1, 8) is not None
