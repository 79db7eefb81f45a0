"""S3 answers that get lost, come late or are errors: the bucket's content decides, never the last answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from botocore.awsrequest import AWSResponse
from botocore.compat import HTTPHeaders
from botocore.exceptions import ReadTimeoutError

from holdfast.crc import crc32
from holdfast.errors import StoreError, StoreMissing
from holdfast.store.base import InterruptedUpload, Store, Upload
from holdfast.store.retrying import RetryBudget, Retrying
from holdfast.store.s3 import S3Store
from holdfast.store.s3_bucket import S3Bucket
from holdfast.store.s3_client import crc_header
from tests.support.s3_place import S3Place, plain_client

pytestmark = pytest.mark.s3

_CHUNK_BYTES = 1 << 20
_IMAGE = memoryview(os.urandom((5 << 20) + 99))


class _Body:
    """A response body in the form that botocore reads from the network."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        yield self._data


def lose_answers(store: S3Store, operation: str, times: int) -> list[int]:
    """Let the server run the operation but lose its answer, `times` times. Return a list that grows with each loss."""
    lost: list[int] = []

    def lose(http_response: AWSResponse, **_: Any) -> None:
        if len(lost) < times:
            lost.append(1)
            http_response.raw.close()  # the body is not read
            raise ReadTimeoutError(endpoint_url="the server")

    store.bucket.client.meta.events.register(f"after-call.s3.{operation}", lose)
    return lost


def refuse(store: S3Store, operation: str, status: int, code: str, times: int) -> list[int]:
    """Answer the operation with an error instead of the server, `times` times."""
    refused: list[int] = []

    def answer(request: Any, **_: Any) -> AWSResponse | None:
        if len(refused) >= times:
            return None
        refused.append(1)
        text = f"<Error><Code>{code}</Code><Message>from the test</Message></Error>".encode()
        return AWSResponse(request.url, status, HTTPHeaders(), cast(Any, _Body(text)))

    events: Any = store.bucket.client.meta.events
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
    """List open uploads and records, which a finished upload must not leave behind."""
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
def test_a_lost_answer_anywhere_changes_nothing(
    place: S3Place, raw: S3Store, store: Store, operation: str
) -> None:
    lost = lose_answers(raw, operation, 1)
    upload = _upload(store)
    upload.publish()
    assert lost == [1]
    assert store.read("step-000000001.pt") == _IMAGE
    if operation == "DeleteObject":  # the record may stay: the next sweep removes it
        store.sweep()
    assert _around(place.bucket) == []


def test_a_publish_without_trouble_does_not_wait_for_a_list_of_uploads(raw: S3Store, store: Store) -> None:
    asked: list[str] = []
    raw.bucket.client.meta.events.register("before-call.s3", lambda model, **_: asked.append(model.name))
    _upload(store).publish()
    assert asked == [
        *("PutObject", "CreateMultipartUpload", "UploadPart", "UploadPart"),
        *("CompleteMultipartUpload", "HeadObject", "DeleteObject"),
    ]


def test_an_upload_that_could_not_be_aborted_goes_with_the_next_one(
    place: S3Place, raw: S3Store, store: Store
) -> None:
    first = _upload(store, "w1")
    refused = refuse(raw, "AbortMultipartUpload", 500, "InternalError", 4)
    with pytest.raises(StoreError, match="InternalError"):
        first.abort()
    assert refused == [1] * 4
    _upload(store, "w2").publish()
    assert _around(place.bucket) == ["run/.holdfast/tmp/upload-w1.json"]
    assert len(store.sweep()) == 1


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
    """Same name, same size, other write-id: our Complete fails, and a check of the size alone would report success."""
    _upload(raw, "theirs").publish()
    ours = _upload(raw, "ours")
    raw.bucket.client.abort_multipart_upload(
        Bucket=raw.bucket.name,
        Key="run/step-000000001.pt",
        UploadId=ours._upload_id,  # type: ignore[attr-defined]
    )
    with pytest.raises(StoreError, match="cannot publish"):  # moto answers 500 here, not NoSuchUpload
        ours.publish()


def test_an_object_replaced_behind_our_back_is_found_out(raw: S3Store) -> None:
    ours = _upload(raw, "ours")

    def overwrite(**_: Any) -> None:
        client = plain_client()
        client.put_object(Bucket=raw.bucket.name, Key="run/step-000000001.pt", Body=bytes(len(_IMAGE)))
        client.close()

    raw.bucket.client.meta.events.register("after-call.s3.CompleteMultipartUpload", overwrite)
    with pytest.raises(StoreError, match="another size or write-id") as caught:
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


def _resume(
    place: S3Place, upload: Upload, write_id: str = "w1", crc32s: dict[int, int] | None = None
) -> Upload:
    """Resume the upload as the next process would."""
    assert upload.token is not None
    return S3Store(place.bucket, "run").resume(
        "step-000000001.pt",
        InterruptedUpload(len(_IMAGE), upload.part_bytes, write_id, upload.token, crc32s or {}),
    )


def test_a_process_that_dies_between_complete_and_its_answer_has_published(
    place: S3Place, raw: S3Store, store: Store
) -> None:
    upload = _upload(raw)
    lost = [*lose_answers(raw, "CompleteMultipartUpload", 1)]
    raw.bucket.client.meta.events.register(
        "before-call.s3.HeadObject", lambda **_: pytest.fail("the process is dead by now")
    )
    with pytest.raises(BaseException, match="dead by now"):
        upload.publish()
    assert lost == []
    second = _resume(place, upload)
    assert second.published
    assert second.written() == {0, 1}
    assert _around(place.bucket) == []
    reader = S3Store(place.bucket, "run")
    assert reader.read("step-000000001.pt") == _IMAGE
    reader.close()


def test_a_complete_that_lands_between_our_two_questions_is_seen(
    place: S3Place, raw: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HEAD finds nothing, the dead process's Complete lands, ListParts knows no upload: the object is still ours."""
    upload, list_parts = _upload(raw), S3Bucket.list_parts

    def late(self: S3Bucket, key: str, upload_id: str) -> Any:
        monkeypatch.setattr(S3Bucket, "list_parts", list_parts)
        upload._complete()  # type: ignore[attr-defined]
        return list_parts(self, key, upload_id)

    monkeypatch.setattr(S3Bucket, "list_parts", late)
    second = _resume(place, upload)
    second.publish()
    assert second.published
    assert raw.read("step-000000001.pt") == _IMAGE
    assert _around(place.bucket) == []


def test_the_object_of_another_write_is_not_the_end_of_ours(place: S3Place, raw: S3Store) -> None:
    _upload(raw, "theirs").publish()
    ours = _upload(raw, "ours")
    second = _resume(place, ours, "ours")
    assert not second.published
    raw.bucket.abort_uploads("run/step-000000001.pt")
    with pytest.raises(StoreMissing, match=r"lifecycle rule.*not this write") as caught:
        _resume(place, ours, "ours")
    assert caught.value.begin_anew


def test_an_upload_that_the_buckets_lifecycle_aborted_is_named(place: S3Place, raw: S3Store) -> None:
    upload = _upload(raw)
    client = plain_client()
    assert upload.token is not None
    client.abort_multipart_upload(Bucket=place.bucket, Key="run/step-000000001.pt", UploadId=upload.token)
    client.close()
    with pytest.raises(
        StoreMissing, match=rf"s3://{place.bucket}/run/step-000000001\.pt.*lifecycle"
    ) as caught:
        _resume(place, upload)
    assert caught.value.begin_anew
    assert not caught.value.retriable


def test_a_part_sent_to_an_aborted_upload_says_begin_anew(swift_s3: S3Place) -> None:
    raw = S3Store(swift_s3.bucket, "run")
    upload = _upload(raw)
    raw.bucket.abort_uploads("run/step-000000001.pt")
    with pytest.raises(StoreError, match=r"NoSuchUpload.*lifecycle.*start over") as caught:
        upload.write_part(1, [_IMAGE[upload.part_bytes :]], crc32(_IMAGE[upload.part_bytes :]))
    assert caught.value.begin_anew
    assert not caught.value.retriable
    raw.close()


def test_the_twin_that_a_lost_answer_left_goes_with_the_resumed_upload(
    place: S3Place, raw: S3Store, store: Store
) -> None:
    lost = lose_answers(raw, "CreateMultipartUpload", 1)
    upload = _upload(store)
    assert lost == [1]
    assert len(_around(place.bucket)) == 3  # two uploads and the record
    raw.sweep(keep={"w1"})
    second = _resume(place, upload)
    assert second.written() == {0, 1}
    second.publish()
    assert _around(place.bucket) == []
    assert raw.read("step-000000001.pt") == _IMAGE


def test_parts_are_listed_over_many_pages(
    place: S3Place, raw: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 lists more than 1,000 parts in pages; a small page size needs few parts."""
    monkeypatch.setattr("holdfast.store.s3_bucket._PARTS_PER_PAGE", 2)
    image = memoryview(bytes(5 << 20))  # every part comes from the same buffer
    nbytes = 4 * len(image) + 10
    upload = raw.begin("many.pt", nbytes=nbytes, chunk_bytes=_CHUNK_BYTES, write_id="w1")
    for index in (0, 1, 2, 3):
        upload.write_part(index, [image], crc32(image))
    upload.write_part(4, [image[:10]], crc32(image[:10]))
    asked: list[int] = []
    reader = S3Store(place.bucket, "run")
    reader.bucket.client.meta.events.register("before-call.s3.ListParts", lambda **_: asked.append(1))
    assert upload.token is not None
    second = reader.resume("many.pt", InterruptedUpload(nbytes, upload.part_bytes, "w1", upload.token))
    assert second.written() == {0, 1, 2, 3, 4}
    assert len(asked) == 3
    second.publish()
    assert raw.size("many.pt") == nbytes
    reader.close()


def test_a_part_with_another_size_at_the_server_is_sent_again(place: S3Place, raw: S3Store) -> None:
    upload = _upload(raw)
    client = plain_client()
    assert upload.token is not None
    client.upload_part(
        Bucket=place.bucket,
        Key="run/step-000000001.pt",
        UploadId=upload.token,
        PartNumber=2,
        Body=b"short",
    )
    client.close()
    second = _resume(place, upload)
    assert second.written() == {0}
    with pytest.raises(StoreError, match="1 of 2 parts are missing"):
        second.publish()
    second.write_part(1, [_IMAGE[second.part_bytes :]], crc32(_IMAGE[second.part_bytes :]))
    second.publish()
    assert raw.read("step-000000001.pt") == _IMAGE


def test_a_part_with_another_crc_at_the_server_is_sent_again(place: S3Place, raw: S3Store) -> None:
    """AWS lists the CRC of every part; these tests' servers do not, so this test adds CRCs to their list."""
    upload = _upload(raw)
    crcs = [crc32(_IMAGE[: upload.part_bytes]), crc32(_IMAGE[upload.part_bytes :])]
    listing = S3Store(place.bucket, "run")

    def add_crcs(parsed: Any, **_: Any) -> None:
        for part, value in zip(parsed["Parts"], crcs, strict=True):
            part["ChecksumCRC32"] = crc_header(value)

    listing.bucket.client.meta.events.register("after-call.s3.ListParts", add_crcs)
    assert upload.token is not None

    def resumed(crc32s: dict[int, int] | None) -> Upload:
        return listing.resume(
            "step-000000001.pt",
            InterruptedUpload(len(_IMAGE), upload.part_bytes, "w1", str(upload.token), crc32s or {}),
        )

    assert resumed(None).written() == {0, 1}
    assert resumed({0: crcs[0], 1: crcs[1]}).written() == {0, 1}
    second = resumed({0: crcs[0], 1: crcs[1] ^ 1})
    assert second.written() == {0}
    second.write_part(1, [_IMAGE[second.part_bytes :]], crcs[1])
    second.publish()
    assert raw.read("step-000000001.pt") == _IMAGE
    listing.close()


def test_an_object_that_stays_another_write_ends_in_begin_anew(raw: S3Store, store: Store) -> None:
    """The store looks again, as a server may be late, then gives up and asks for a new upload."""
    ours = _upload(store, "ours")

    def overwrite(**_: Any) -> None:
        client = plain_client()
        client.put_object(Bucket=raw.bucket.name, Key="run/step-000000001.pt", Body=bytes(len(_IMAGE)))
        client.close()

    raw.bucket.client.meta.events.register("after-call.s3.CompleteMultipartUpload", overwrite)
    with pytest.raises(StoreError, match=r"another size or write-id.*given up after 4 attempts") as caught:
        ours.publish()
    assert caught.value.begin_anew
    assert not caught.value.retriable


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
    second = _resume(swift_s3, upload)
    assert second.written() == {0}
    second.write_part(1, [_IMAGE[upload.part_bytes :]], crc32(_IMAGE[upload.part_bytes :]))
    second.publish()
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
    assert len(waits) == 5
    store.close()
