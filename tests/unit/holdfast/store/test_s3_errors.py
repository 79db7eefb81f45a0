"""Which S3 answers are transient, and which a person must fix."""

from __future__ import annotations

from typing import Any

import pytest
from botocore import exceptions

from holdfast.errors import StoreError, StoreMissing
from holdfast.store.s3_errors import translate_errors

_URL = "s3://bucket/run/x"


def _raised(error: Exception) -> StoreError:
    with pytest.raises(StoreError) as caught, translate_errors("write", _URL):
        raise error
    assert _URL in str(caught.value)
    return caught.value


def _answer(code: str, status: int) -> exceptions.ClientError:
    answer: Any = {
        "Error": {"Code": code, "Message": "said the server"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return exceptions.ClientError(answer, "PutObject")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("SlowDown", 503),
        ("InternalError", 500),
        ("Unheard", 502),
        ("TooMany", 429),
        ("RequestTimeout", 400),
        ("ConditionalRequestConflict", 409),
        ("BadDigest", 400),
    ],
)
def test_a_passing_answer_is_retriable(code: str, status: int) -> None:
    error = _raised(_answer(code, status))
    assert error.retriable
    assert code in str(error)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("7", 7.0),
        (" 0.5 ", 0.5),
        ("", 0.0),
        ("-3", 0.0),
        ("nan", 0.0),
        ("Wed, 21 Oct 2026 07:28:00 GMT", 0.0),
        ("9" * 400, 0.0),
    ],
)
def test_retry_after_is_taken_from_the_answer(said: str, seconds: float) -> None:
    answer = _answer("SlowDown", 503)
    answer.response["ResponseMetadata"]["HTTPHeaders"] = {"retry-after": said}
    assert _raised(answer).retry_after_seconds == seconds
    assert _raised(_answer("SlowDown", 503)).retry_after_seconds == 0.0


@pytest.mark.parametrize(
    ("code", "status", "remedy"),
    [
        ("NoSuchBucket", 404, "create the bucket"),
        ("AccessDenied", 403, "allow this role"),
        ("InvalidAccessKeyId", 403, "AWS_ACCESS_KEY_ID"),
        ("SignatureDoesNotMatch", 403, "AWS_SECRET_ACCESS_KEY"),
        ("RequestTimeTooSkewed", 403, "clock"),
        ("PermanentRedirect", 301, "AWS_REGION"),
        ("NoSuchUpload", 404, "start over"),
        ("NotImplemented", 501, "said the server"),
        ("InsufficientStorage", 507, "delete old checkpoints"),
    ],
)
def test_an_answer_that_a_person_must_mend_says_how(code: str, status: int, remedy: str) -> None:
    error = _raised(_answer(code, status))
    assert not error.retriable
    assert code in str(error)
    assert remedy in str(error)


def test_a_token_that_is_over_may_be_renewed_and_says_what_to_mend() -> None:
    error = _raised(_answer("ExpiredToken", 400))
    assert error.retriable
    assert "get a new one" in str(error)


@pytest.mark.parametrize("code", ["NoSuchKey", "404"])
def test_a_404_is_store_missing(code: str) -> None:
    assert isinstance(_raised(_answer(code, 404)), StoreMissing)


@pytest.mark.parametrize(
    ("error", "retriable"),
    [
        (exceptions.NoCredentialsError(), False),
        (exceptions.PartialCredentialsError(provider="env", cred_var="secret"), False),
        (exceptions.EndpointConnectionError(endpoint_url="http://x"), True),
        (exceptions.ConnectTimeoutError(endpoint_url="http://x"), True),
        (exceptions.ReadTimeoutError(endpoint_url="http://x"), True),
        (exceptions.ConnectionClosedError(endpoint_url="http://x"), True),
        (exceptions.ResponseStreamingError(error=OSError("cut")), True),
        (exceptions.IncompleteReadError(actual_bytes=1, expected_bytes=2), True),
        (ConnectionResetError("reset"), True),
        (exceptions.NoRegionError(), False),
    ],
)
def test_failures_on_the_way(error: Exception, retriable: bool) -> None:
    assert _raised(error).retriable is retriable
