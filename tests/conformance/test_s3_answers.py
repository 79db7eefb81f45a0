"""S3 when answers get lost, come late or say no: the truth is what stands in the bucket, never the last answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from botocore.awsrequest import AWSResponse
from botocore.compat import HTTPHeaders
from botocore.exceptions import ReadTimeoutError

from holdfast.crc import crc32
from holdfast.errors import StoreError
from holdfast.storage import Store, Upload
from holdfast.storage.retrying import RetryBudget, Retrying
from holdfast.storage.s3 import S3Store
from tests.support.s3_place import S3Place, plain_client

pytestmark = pytest.mark.s3

_CHUNK_BYTES = 1 << 20
_IMAGE = memoryview(os.urandom((5 << 20) + 99))


class _Body:
    """A body as botocore reads one from the network."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        yield self._data


def lose_answers(store: S3Store, operation: str, times: int) -> list[int]:
    """Let the server do the operation, and lose its answer, `times` times. Returns a list that grows with each."""
    lost: list[int] = []

    def lose(**_: Any) -> None:
        if len(lost) < times:
            lost.append(1)
            raise ReadTimeoutError(endpoint_url="the server")

    store.client.meta.events.register(f"after-call.s3.{operation}", lose)
    return lost


def refuse(store: S3Store, operation: str, status: int, code: str, times: int) -> list[int]:
    """Answer the operation with an error in the server's place, as often as `times`."""
    refused: list[int] = []

    def answer(request: Any, **_: Any) -> AWSResponse | None:
        if len(refused) >= times:
            return None
        refused.append(1)
        text = f"<Error><Code>{code}</Code><Message>from the test</Message></Error>".encode()
        return AWSResponse(request.url, status, HTTPHeaders(), cast(Any, _Body(text)))

    events: Any = store.client.meta.events
    events.register(f"before-send.s3.{operation}", answer)
    return refused


@pytest.fixture(params=["swift", "moto"])
def place(request: pytest.FixtureRequest) -> S3Place:
    return cast(S3Place, request.getfixturevalue(f"{request.param}_s3"))


@pytest.fixture
def raw(place: S3Place) -> Iterator[S3Store]:
    store = S3Store(place.bucket, "run")
    yield store
    store.close()


@pytest.fixture
def store(raw: S3Store) -> Store:
    return Retrying(raw, budget=RetryBudget(attempts_max=4), sleep=lambda _: None)


def _upload(store: Store, write_id: str = "w1") -> Upload:
    upload = store.begin("step-000000001.pt", nbytes=len(_IMAGE), chunk_bytes=_CHUNK_BYTES, write_id=write_id)
    for index in range(2):
        piece = _IMAGE[index * upload.part_bytes : (index + 1) * upload.part_bytes]
        upload.write_part(index, [piece], crc32(piece))
    return upload


def _around(bucket: str) -> list[str]:
    """What a finished upload must not leave behind."""
    client = plain_client()
    keys = [item["Key"] for item in client.list_objects_v2(Bucket=bucket).get("Contents", [])]
    uploads = [
        f"upload {upload['Key']}"
        for upload in client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
    ]
    client.close()
    return [key for key in keys if key != "run/step-000000001.pt"] + uploads


@pytest.mark.parametrize(
    "operation",
    [
        "PutObject",
        "CreateMultipartUpload",
        "UploadPart",
        "CompleteMultipartUpload",
        "HeadObject",
        "DeleteObject",
    ],
)
def test_one_lost_answer_anywhere_changes_nothing(
    place: S3Place, raw: S3Store, store: Store, operation: str
) -> None:
    lost = lose_answers(raw, operation, 1)
    upload = _upload(store)
    upload.publish()
    assert lost == [1]
    assert store.read("step-000000001.pt") == _IMAGE
    if (
        operation == "DeleteObject"
    ):  # the record's removal is not insisted on: the next sweep takes it, if it is there
        store.sweep()
    assert _around(place.bucket) == []


def test_a_lost_create_is_still_ours(raw: S3Store, store: Store) -> None:
    lost = lose_answers(raw, "PutObject", 1)
    assert store.create(".holdfast/writer-000001.json", b"write-id 1")
    assert lost == [1]
    assert not store.create(".holdfast/writer-000001.json", b"write-id 2")
    assert store.read(".holdfast/writer-000001.json") == b"write-id 1"


@pytest.mark.parametrize(
    ("status", "code"),
    [(503, "SlowDown"), (500, "InternalError"), (409, "ConditionalRequestConflict"), (400, "RequestTimeout")],
)
@pytest.mark.parametrize("operation", ["PutObject", "UploadPart", "CompleteMultipartUpload"])
def test_refusals_that_pass_are_waited_out(
    raw: S3Store, store: Store, operation: str, status: int, code: str
) -> None:
    refused = refuse(raw, operation, status, code, 2)
    _upload(store).publish()
    assert refused == [1, 1]
    assert store.read("step-000000001.pt") == _IMAGE


def test_a_lost_read_is_read_again(raw: S3Store, store: Store) -> None:
    store.write("object", b"0123456789")
    target = bytearray(4)
    lost = lose_answers(raw, "GetObject", 2)
    store.read_into("object", 3, memoryview(target))
    assert lost == [1, 1]
    assert target == b"3456"


def test_an_object_of_another_writer_is_never_taken_for_ours(raw: S3Store) -> None:
    """Same name, same size, other write-id: our Complete fails, and a look by size alone would call it done."""
    _upload(raw, "theirs").publish()
    ours = _upload(raw, "ours")
    raw.client.abort_multipart_upload(
        Bucket=raw.bucket,
        Key="run/step-000000001.pt",
        UploadId=ours._upload_id,  # type: ignore[attr-defined]
    )
    with pytest.raises(StoreError, match="cannot publish"):  # moto answers 500 here, not NoSuchUpload
        ours.publish()


def test_an_object_replaced_behind_our_back_is_found_out(raw: S3Store) -> None:
    ours = _upload(raw, "ours")

    def overwrite(**_: Any) -> None:
        client = plain_client()
        client.put_object(Bucket=raw.bucket, Key="run/step-000000001.pt", Body=bytes(len(_IMAGE)))
        client.close()

    raw.client.meta.events.register("after-call.s3.CompleteMultipartUpload", overwrite)
    with pytest.raises(StoreError, match="write-id differ") as caught:
        ours.publish()
    assert caught.value.retriable


def test_a_part_with_a_wrong_crc_is_refused_by_the_server(swift_s3: S3Place) -> None:
    raw = S3Store(swift_s3.bucket, "run")
    upload = raw.begin("step-000000001.pt", nbytes=100, chunk_bytes=_CHUNK_BYTES, write_id="w1")
    with pytest.raises(StoreError, match="BadDigest") as caught:
        upload.write_part(0, [_IMAGE[:100]], crc32(_IMAGE[:100]) ^ 1)
    assert caught.value.retriable
    with pytest.raises(StoreError, match="missing"):
        upload.publish()
    upload.abort()
    raw.close()


def test_retries_end_and_say_how_often(raw: S3Store, store: Store) -> None:
    refused = refuse(raw, "PutObject", 503, "SlowDown", 1000)
    with pytest.raises(StoreError, match=r"SlowDown.*given up after 4 attempts of write") as caught:
        store.write("object", b"x")
    assert caught.value.retriable
    assert len(refused) == 4


def test_a_permission_error_is_not_tried_again(raw: S3Store, store: Store) -> None:
    refused = refuse(raw, "PutObject", 403, "AccessDenied", 1000)
    with pytest.raises(StoreError, match=r"AccessDenied.*allow this role") as caught:
        store.write("object", b"x")
    assert not caught.value.retriable
    assert refused == [1]


def test_an_open_upload_survives_the_death_of_the_server(swift_s3: S3Place, swift_server: Any) -> None:
    raw = S3Store(swift_s3.bucket, "run")
    store = Retrying(raw)
    upload = store.begin("step-000000001.pt", nbytes=len(_IMAGE), chunk_bytes=_CHUNK_BYTES, write_id="w1")
    upload.write_part(0, [_IMAGE[: upload.part_bytes]], crc32(_IMAGE[: upload.part_bytes]))
    swift_server.stop(kill=True)
    with pytest.raises(StoreError) as caught:
        raw.check(write=False)
    assert caught.value.retriable
    swift_server.start()
    upload.write_part(1, [_IMAGE[upload.part_bytes :]], crc32(_IMAGE[upload.part_bytes :]))
    upload.publish()
    assert store.read("step-000000001.pt") == _IMAGE
    store.close()


_Prepare = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (
            lambda patch: patch.setenv("AWS_SECRET_ACCESS_KEY", "wrong"),
            "SignatureDoesNotMatch.*AWS_SECRET_ACCESS_KEY",
        ),
        (
            lambda patch: patch.setenv("AWS_ACCESS_KEY_ID", "nobody"),
            "InvalidAccessKeyId.*|SignatureDoesNotMatch.*",
        ),
        (
            lambda patch: (patch.delenv("AWS_ACCESS_KEY_ID"), patch.delenv("AWS_SECRET_ACCESS_KEY")),
            "no credentials.*AWS_ACCESS_KEY_ID",
        ),
    ],
    ids=["wrong secret", "unknown key", "no credentials"],
)
def test_wrong_credentials_are_refused_at_start(
    swift_s3: S3Place, monkeypatch: pytest.MonkeyPatch, prepare: _Prepare, says: str
) -> None:
    prepare(monkeypatch)
    store = Retrying(S3Store(swift_s3.bucket, "run"), sleep=lambda _: pytest.fail("must not wait"))
    with pytest.raises(StoreError, match=f"s3://{swift_s3.bucket}/run.*{says}") as caught:
        store.check(write=True)
    assert not caught.value.retriable
    assert "wrong" not in str(caught.value).partition("SignatureDoesNotMatch")[0]
    store.close()


def test_a_missing_bucket_is_refused_at_start(place: S3Place) -> None:
    store = Retrying(S3Store("no-such-bucket-here", "run"), sleep=lambda _: pytest.fail("must not wait"))
    with pytest.raises(
        StoreError, match=r"s3://no-such-bucket-here/run.*NoSuchBucket.*create the bucket"
    ) as caught:
        store.check(write=True)
    assert not caught.value.retriable
    store.close()


def test_a_server_that_is_not_there_is_named(place: S3Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    waits: list[float] = []
    store = Retrying(S3Store(place.bucket, "run"), sleep=waits.append)
    with pytest.raises(StoreError, match=r"does not answer.*127\.0\.0\.1:9.*AWS_ENDPOINT_URL"):
        store.check(write=False)
    assert len(waits) == 2
    store.close()
