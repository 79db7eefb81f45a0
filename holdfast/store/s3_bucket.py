"""The requests to an S3 bucket, on AWS or any server that speaks S3: one method for each, with its errors translated.

The methods call boto3's single operations: its high-level transfers neither accept our CRC nor say which answer was
lost. boto3 takes endpoint, region and credentials from its usual places (AWS_ENDPOINT_URL, AWS_REGION, AWS_PROFILE,
instance role).
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from holdfast.crc import crc32
from holdfast.errors import DamageError, StoreError, StoreMissing
from holdfast.store.base import reject_oversized
from holdfast.store.s3_client import crc_header, credentials_of, make_client
from holdfast.store.s3_errors import EXPIRED, code_of, status_of, translate_errors

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import PartTypeDef


_READ_BYTES = 120 << 10  # above 128 KiB malloc maps fresh memory for each piece, and its first touch is slow
_PARTS_PER_PAGE = 1000
_NO_UPLOAD = frozenset({"NoSuchUpload", "InvalidArgument", "NoSuchKey", "404"})
"""Servers' error codes for an upload id that they do not know, or no longer know."""
_RENEWABLE = EXPIRED | {"InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch", "403", "AccessDenied"}
_RENEW_SECONDS_MIN = 1.0  # many parts fail at the same moment
_UPLOAD_ID = re.compile(r"[!-~]{1,1024}")


class S3Bucket:
    """A bucket. Thread-safe. No network before the first call."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._client: S3Client | None = None
        self._renewed_at = -_RENEW_SECONDS_MIN
        self._client_lock = threading.Lock()
        self._strays: set[str] = set()  # keys that may have an open upload with an unknown id

    @property
    def client(self) -> S3Client:
        """The boto3 client; made at first use, since it reads files and may ask the instance for its role."""
        with self._client_lock:
            if self._client is None:
                self._client = make_client(f"s3://{self.name}")
            return self._client

    def close(self) -> None:
        """Close the connections. The next call opens new ones."""
        with self._client_lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def url(self, key: str) -> str:
        return f"s3://{self.name}/{key}"

    @contextmanager
    def translate_errors(self, operation: str, key: str) -> Iterator[None]:
        """Translate boto3's errors. Rejected credentials are read again: if they may differ, the call is retriable."""
        from botocore.exceptions import ClientError

        try:
            with translate_errors(operation, self.url(key).rstrip("/")):
                yield
        except StoreError as error:
            cause = error.__cause__
            if not isinstance(cause, ClientError) or code_of(cause) not in _RENEWABLE:
                raise
            if not self._renew_credentials() or error.retriable:
                raise
            raise StoreError(str(error), retriable=True) from cause

    def _renew_credentials(self) -> bool:
        """Make another client, unless that was just done; return whether its credentials may differ."""
        with self._client_lock:
            if self._client is None or time.monotonic() - self._renewed_at < _RENEW_SECONDS_MIN:
                return True  # another thread has done it: try its credentials first
            before = credentials_of(self._client)
            # Other threads may be using the old client, so it is not closed.
            self._client, self._renewed_at = make_client(f"s3://{self.name}"), time.monotonic()
            return credentials_of(self._client) != before

    def check(self, prefix: str) -> None:
        with self.translate_errors("list", prefix):
            self.client.list_objects_v2(Bucket=self.name, Prefix=prefix, MaxKeys=1)

    def sizes(self, prefix: str) -> list[tuple[str, int]]:
        """Return the keys under a prefix, with the size of each object."""
        with self.translate_errors("list", prefix):
            pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
            return [(item["Key"], int(item["Size"])) for page in pages for item in page.get("Contents", [])]

    def head(self, key: str) -> dict[str, Any]:
        """Return the metadata of an object. Raises `StoreMissing`."""
        with self.translate_errors("read", key):
            return dict(self.client.head_object(Bucket=self.name, Key=key))

    def get(self, key: str, bytes_max: int) -> bytes:
        """Read an object whole. Raises `DamageError` if it is above `bytes_max`."""
        with self.translate_errors("read", key):
            response = self.client.get_object(Bucket=self.name, Key=key)
            with response["Body"] as body:
                content_length = int(response.get("ContentLength", 0))
                reject_oversized(self.url(key), content_length, bytes_max)
                data = bytearray()
                while piece := body.read(_READ_BYTES):  # to its end, where the checksum is compared
                    data += piece
                    reject_oversized(self.url(key), len(data), bytes_max)
        if len(data) < content_length:
            raise StoreError(
                f"cannot read {self.url(key)}: the answer ended after {len(data)} of {content_length} bytes",
                retriable=True,
            )
        return bytes(data)

    def get_into(self, key: str, offset: int, view: memoryview) -> None:
        """Fill `view` with an object's bytes from `offset`, by one ranged GET."""
        from botocore.exceptions import ClientError

        end = offset + view.nbytes
        done = 0
        with self.translate_errors("read", key):
            try:
                response = self.client.get_object(
                    Bucket=self.name, Key=key, Range=f"bytes={offset}-{end - 1}"
                )
            except ClientError as error:
                if status_of(error) != 416:
                    raise
                raise self._truncation_error(key, offset, end, 0) from error
            with response["Body"] as body:
                content_length = int(response["ContentLength"])
                while done < min(view.nbytes, content_length):
                    piece = body.read(min(_READ_BYTES, view.nbytes - done))
                    if not piece:
                        break
                    view[done : done + len(piece)] = piece
                    done += len(piece)
        if done < min(view.nbytes, content_length):
            raise StoreError(
                f"cannot read {self.url(key)}: the answer ended after {done} of {content_length} bytes",
                retriable=True,
            )
        if done < view.nbytes:
            raise self._truncation_error(key, offset, end, done)

    def put(self, key: str, data: bytes) -> None:
        """Write a small object; the server checks its CRC-32."""
        with self.translate_errors("write", key):
            self._put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        """Write only if the key is free: a conditional PUT, then a look at the object, since some servers ignore the
        condition. `data` must hold the caller's write-id: two callers with the same bytes would both get True.
        """
        from botocore.exceptions import ClientError

        with self.translate_errors("create", key):
            try:
                self._put(key, data, IfNoneMatch="*")
            except ClientError as error:
                # 409: another one was in flight at the same moment. 501: the server has no conditions.
                if status_of(error) == 501 or code_of(error) == "NotImplemented":
                    return self._create_unconditionally(key, data)
                if status_of(error) not in (409, 412):
                    raise
        try:
            return self._holds(key, data)
        except StoreMissing as error:
            raise StoreError(
                f"cannot create {self.url(key)}: it was refused or deleted at the same moment",
                retriable=True,
            ) from error

    def delete(self, key: str) -> None:
        with self.translate_errors("delete", key):
            self.client.delete_object(Bucket=self.name, Key=key)

    def abort_uploads(self, key: str, *, only: str | None = None) -> list[str]:
        """Abort every open upload of exactly this key, or the one `only`; return descriptions of them."""
        from botocore.exceptions import ClientError

        with self.translate_errors("abort uploads of", key):
            found = [only] if only else self._list_open_uploads(key)
            for upload_id in found:
                try:
                    self.client.abort_multipart_upload(Bucket=self.name, Key=key, UploadId=upload_id)
                except ClientError as error:
                    if code_of(error) not in ("NoSuchUpload", "404", "NoSuchKey"):
                        raise
        if only is None:
            self._strays.discard(key)
        return [f"open multipart upload of {self.url(key)}" for _ in found]

    def note_stray(self, key: str) -> None:
        """Note that a lost answer may have left an open upload of this key."""
        self._strays.add(key)

    def may_have_strays(self, key: str) -> bool:
        """Whether `note_stray` was called since all uploads of this key were last aborted."""
        return key in self._strays

    def list_parts(self, key: str, upload_id: str) -> list[PartTypeDef]:
        """Return the parts of an open upload. Raises `StoreMissing` if the server does not know the upload."""
        from botocore.exceptions import ClientError

        unknown = StoreMissing(f"{self.url(key)}: no upload {upload_id[:80]!r} is open")
        if not _UPLOAD_ID.fullmatch(upload_id):
            raise unknown
        found: list[PartTypeDef] = []
        with self.translate_errors("list the parts of", key):
            pages = self.client.get_paginator("list_parts").paginate(
                Bucket=self.name, Key=key, UploadId=upload_id, PaginationConfig={"PageSize": _PARTS_PER_PAGE}
            )
            try:
                for page in pages:
                    if page.get("Key", key) != key:  # some servers look only at the id
                        raise unknown
                    found += page.get("Parts", [])
            except ClientError as error:
                if code_of(error) in _NO_UPLOAD:
                    raise unknown from error
                raise
        return found

    def _list_open_uploads(self, key: str) -> list[str]:
        pages = self.client.get_paginator("list_multipart_uploads").paginate(Bucket=self.name, Prefix=key)
        return [
            upload["UploadId"] for page in pages for upload in page.get("Uploads", []) if upload["Key"] == key
        ]

    def _holds(self, key: str, data: bytes) -> bool:
        try:
            return self.get(key, len(data)) == data
        except DamageError:
            return False

    def _create_unconditionally(self, key: str, data: bytes) -> bool:
        try:
            self.head(key)
        except StoreMissing:
            self.put(key, data)
        return self._holds(key, data)

    def _put(self, key: str, data: bytes, **condition: Any) -> None:
        self.client.put_object(
            Bucket=self.name, Key=key, Body=data, ChecksumCRC32=crc_header(crc32(data)), **condition
        )

    def _truncation_error(self, key: str, offset: int, end: int, got: int) -> DamageError:
        return DamageError(
            f"{self.url(key)}: bytes {offset} to {end} were expected, only {got} of them are there; "
            "the object is truncated, take another checkpoint"
        )
