"""Turns an error of S3 into an error that says whether to retry or what a person must do.

boto3's own messages name neither the run nor a remedy, so each becomes a `StoreError` before it leaves this package.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.errors import StoreError, StoreMissing

if TYPE_CHECKING:
    from botocore.exceptions import ClientError


_CREDENTIALS = (
    "see AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_PROFILE, or the instance's role"
)
_ADVICE = {
    "NoSuchBucket": "create the bucket, or correct the URL; see AWS_ENDPOINT_URL if it is not on AWS",
    "AccessDenied": "allow this role s3:GetObject, PutObject, DeleteObject, AbortMultipartUpload on the prefix, and "
    "ListBucket and ListBucketMultipartUploads on the bucket",
    "403": "the credentials are wrong, or the role may not do this on the prefix",
    "AllAccessDisabled": "the account or bucket is closed; ask its owner",
    "InvalidAccessKeyId": f"the access key is not known there: {_CREDENTIALS}",
    "SignatureDoesNotMatch": f"the secret key is wrong: {_CREDENTIALS}",
    "ExpiredToken": f"the session token is over, get a new one: {_CREDENTIALS}",
    "InvalidToken": f"the session token is not valid there: {_CREDENTIALS}",
    "RequestTimeTooSkewed": "set this machine's clock (chrony or ntp); it differs from the server's by over 15 minutes",
    "PermanentRedirect": "the bucket is in another region; set AWS_REGION to it",
    "AuthorizationHeaderMalformed": "the bucket is in another region; set AWS_REGION to it",
    "IllegalLocationConstraintException": "the bucket is in another region; set AWS_REGION to it",
    "InvalidBucketName": "correct the bucket's name in the URL",
    "NoSuchUpload": "the multipart upload was aborted (a lifecycle rule, a sweep, or a second writer); start over",
    "EntityTooLarge": "the server takes no object or part of this size",
    "EntityTooSmall": "the server wants larger parts; set a larger chunk_bytes",
    "QuotaExceeded": "delete old checkpoints, or ask for a larger quota",
    "InvalidObjectState": "the object is archived; restore it to a readable storage class first",
}
# The renewal of credentials may be late: the call is retried with newly read ones (s3_bucket.py).
EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})
_RETRIABLE = EXPIRED | {
    *("SlowDown", "RequestTimeout", "RequestTimeoutException", "Throttling", "ThrottlingException"),
    *("TooManyRequests", "RequestLimitExceeded", "InternalError", "ServiceUnavailable"),
    *("OperationAborted", "ConditionalRequestConflict"),
    # The bytes changed between our CRC and the server: sending them again repairs that.
    *("BadDigest", "InvalidDigest", "IncompleteBody"),
    *("XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"),
}
_MISSING = frozenset({"NoSuchKey", "404", "NoSuchVersion"})


def code_of(error: ClientError) -> str:
    """Return the server's name for the error, such as `SlowDown`, else the HTTP status."""
    return str(error.response.get("Error", {}).get("Code", "")) or str(status_of(error))


def status_of(error: ClientError) -> int:
    """Return the HTTP status; 0 without a status."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


@contextmanager
def translate_errors(operation: str, url: str) -> Iterator[None]:
    """Translate boto3's errors inside the block."""
    from botocore import exceptions
    from urllib3.exceptions import HTTPError

    try:
        yield
    except exceptions.ClientError as error:
        raise _from_client_error(error, operation, url) from error
    except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError) as error:
        raise StoreError(f"cannot {operation} {url}: no credentials: {_CREDENTIALS}") from error
    except exceptions.ParamValidationError as error:
        raise StoreError(
            f"cannot {operation} {url}: S3 does not take such a name or value: {error}"
        ) from error
    except exceptions.EndpointConnectionError as error:
        raise StoreError(
            f"cannot {operation} {url}: the server does not answer ({error}); "
            "see the network, AWS_ENDPOINT_URL and AWS_REGION",
            retriable=True,
        ) from error
    except (
        exceptions.ConnectionError,  # of botocore: also its connect timeout, which is no HTTPClientError
        exceptions.HTTPClientError,
        exceptions.IncompleteReadError,
        HTTPError,
        ConnectionError,
        TimeoutError,
    ) as error:
        raise StoreError(
            f"cannot {operation} {url}: the connection failed ({type(error).__name__}: {error})",
            retriable=True,
        ) from error
    except exceptions.BotoCoreError as error:
        raise StoreError(
            f"cannot {operation} {url}: {error}; see the AWS settings of this process"
        ) from error


def _from_client_error(error: ClientError, operation: str, url: str) -> StoreError:
    code, status = code_of(error), status_of(error)
    if code in _MISSING:
        return StoreMissing(f"{url}: there is no such object ({operation})")
    text = str(error.response.get("Error", {}).get("Message", "")).strip() or f"HTTP {status}"
    # 501: the server does not support the operation.
    retriable = status != 501 and (code in _RETRIABLE or status in (408, 429) or status >= 500)
    retry_after_seconds = _retry_after_seconds(error) if retriable else 0.0
    advice = _ADVICE.get(code)
    if advice is None and status == 507:
        advice, retriable = _ADVICE["QuotaExceeded"], False
    return StoreError(
        f"cannot {operation} {url}: {code}: {text}" + (f"; {advice}" if advice else ""),
        retriable=retriable,
        begin_anew=code == "NoSuchUpload",
        retry_after_seconds=retry_after_seconds,
    )


def _retry_after_seconds(error: ClientError) -> float:
    """Return the seconds of the answer's `Retry-After`; 0 without one, or if it is no number of seconds.

    The header may also be a date: for that the two clocks would have to agree, and no S3 server is known to send one.
    """
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    value = str(headers.get("retry-after", "")).strip()
    return float(value) if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", value) else 0.0
