"""A run under a prefix of an S3 bucket, on AWS or any server that speaks S3.

    begin ─► record, CreateMultipartUpload ─► UploadPart + CRC-32 (the server checks it) ─► Complete
          ─► HEAD: size, write-id ─► record away

boto3 is asked for every operation by itself: its high-level transfers neither take our CRC nor say which
answer was lost. It takes endpoint, region and credentials from its usual places (AWS_ENDPOINT_URL,
AWS_REGION, AWS_PROFILE, instance role). The record (`.holdfast/tmp/upload-<write-id>.json`) is there before
the upload and names its key: S3 lists open uploads without their metadata, and a sweep must not touch what
lies under the same prefix and is not ours.
"""

from __future__ import annotations

import builtins
import json
import logging
import re
import secrets
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from holdfast.crc import crc32
from holdfast.errors import DamageError, StoreError, StoreMissing
from holdfast.store.base import ObjectInfo
from holdfast.store.names import TEMPORARY, Keep, check_name, check_write_id, is_kept
from holdfast.store.s3_client import crc_header, make_client
from holdfast.store.s3_errors import code_of, status_of, translated

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import PartTypeDef

    from holdfast.store.s3_upload import S3Upload


_log = logging.getLogger("holdfast.storage.s3")

_REQUEST_BYTES = 16 << 20
_READ_BYTES = 120 << 10  # above 128 KiB malloc maps fresh memory for each piece, and its first touch is slow
_PARTS_PER_PAGE = 1000
_NO_UPLOAD = frozenset({"NoSuchUpload", "InvalidArgument", "NoSuchKey", "404"})
"""What servers say of an upload id that is not theirs, or not any more."""
_UPLOAD_ID = re.compile(r"[!-~]{1,1024}")

_RECORD = f"{TEMPORARY}upload-"


class S3Store:
    """A bucket's prefix as a store. All methods may be called from any thread. No network before the first
    call.

    Args:
        bucket: Name of the bucket.
        prefix: The run's place in it, without slashes at its ends; "" for the bucket itself.
        client: The boto3 client to use instead of one of our own (tests).
    """

    def __init__(self, bucket: str, prefix: str, *, client: S3Client | None = None) -> None:
        self._bucket, self._prefix = bucket, f"{prefix}/" if prefix else ""
        self._given_client = client
        self._making_client = threading.Lock()
        self._check_name = f"check-{secrets.token_hex(8)}"
        self._strays: set[str] = set()  # keys of which an upload may be open that nobody here knows

    @property
    def url(self) -> str:
        """`s3://bucket/prefix`."""
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def bucket(self) -> str:
        """Name of the bucket."""
        return self._bucket

    @property
    def client(self) -> S3Client:
        """The boto3 client; made at first use, since it reads files and may ask the instance for its role."""
        with self._making_client:
            if self._given_client is None:
                self._given_client = make_client(self.url)
            return self._given_client

    @property
    def request_bytes(self) -> int:
        """16 MiB: a request costs money and a round trip."""
        return _REQUEST_BYTES

    def close(self) -> None:
        """Close the connections. The next call opens new ones."""
        with self._making_client:
            client, self._given_client = self._given_client, None
        if client is not None:
            client.close()

    def check(self, *, write: bool) -> None:
        """See that bucket and credentials hold; with `write` that a small object can be written, read and
        deleted.
        """
        with translated("list", self.url):
            self.client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1)
        if not write:
            return
        # A name that a second try has too: an object whose deletion failed is written over, and deleted then.
        key, data = (
            f"{self._prefix}{TEMPORARY}{self._check_name}-{threading.get_ident()}",
            b"holdfast check\n",
        )
        self._put(key, data)
        try:
            back = self._get(key)
        finally:
            self._delete(key)
        if back != data:
            raise DamageError(
                f"{self._named(key)}: the server returned other bytes than were written; repair the server first"
            )

    def list(self) -> list[ObjectInfo]:
        """All objects of the run, sorted by name."""
        found = []
        for key, nbytes in self._keys(self._prefix):
            name = key[len(self._prefix) :]
            if name and not name.endswith("/") and not name.startswith(TEMPORARY):
                found.append(ObjectInfo(name, nbytes))
        return sorted(found)

    def size(self, name: str) -> int:
        """Size of an object in bytes."""
        return int(self.head(self.key(name))["ContentLength"])

    def read(self, name: str) -> bytes:
        """The whole of a small object."""
        return self._get(self.key(name))

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset`, by one ranged GET."""
        from botocore.exceptions import ClientError

        key, view = self.key(name), buffer.cast("B")
        if not view.nbytes:
            return
        end = offset + view.nbytes
        done = 0
        with translated("read", self._named(key)):
            try:
                answer = self.client.get_object(
                    Bucket=self._bucket, Key=key, Range=f"bytes={offset}-{end - 1}"
                )
            except ClientError as error:
                if status_of(error) != 416:
                    raise
                raise self._too_short(key, offset, end, 0) from error
            with answer["Body"] as body:
                promised = int(answer["ContentLength"])
                while done < min(view.nbytes, promised):
                    piece = body.read(min(_READ_BYTES, view.nbytes - done))
                    if not piece:
                        break
                    view[done : done + len(piece)] = piece
                    done += len(piece)
        if done < min(view.nbytes, promised):
            raise StoreError(
                f"cannot read {self._named(key)}: the answer ended after {done} of {promised} bytes",
                retriable=True,
            )
        if done < view.nbytes:
            raise self._too_short(key, offset, end, done)

    def write(self, name: str, data: bytes) -> None:
        """Write a small object; the server checks its CRC-32."""
        self._put(self.key(name), data)

    def create(self, name: str, data: bytes) -> bool:
        """Write only if nothing is there: a conditional PUT, and a look at what stands there afterwards.

        Some servers ignore the condition or keep it only most of the time, and an answer may be lost: what is
        read back decides. So `data` must be the caller's own (hold its write-id): two callers with the same
        bytes would both be told True.
        """
        from botocore.exceptions import ClientError

        key = self.key(name)
        with translated("create", self._named(key)):
            try:
                self._put_object(key, data, IfNoneMatch="*")
            except ClientError as error:
                # 409: another one was under way at the same moment. 501: the server has no conditions.
                if status_of(error) == 501 or code_of(error) == "NotImplemented":
                    return self._create_unconditionally(key, data)
                if status_of(error) not in (409, 412):
                    raise
        try:
            return self._get(key) == data
        except StoreMissing as error:
            raise StoreError(
                f"cannot create {self._named(key)}: it was refused or deleted at the same moment",
                retriable=True,
            ) from error

    def delete(self, name: str) -> None:
        """Remove an object."""
        self._delete(self.key(name))

    def retire(self, name: str) -> None:
        """As `delete`."""
        self.delete(name)

    def begin(self, name: str, *, nbytes: int, chunk_bytes: int, write_id: str) -> S3Upload:
        """Start a multipart upload, even of a small image: one way, tested always."""
        from holdfast.store.s3_upload import S3Upload, part_bytes_for

        key, record = self.key(name), self._record(write_id)
        part_bytes = part_bytes_for(nbytes, chunk_bytes)
        self._put(record, json.dumps({"key": key, "write_id": write_id}).encode())
        return S3Upload(self, key, record=record, nbytes=nbytes, part_bytes=part_bytes, write_id=write_id)

    def resume(
        self,
        name: str,
        *,
        nbytes: int,
        chunk_bytes: int,  # noqa: ARG002
        part_bytes: int,
        write_id: str,
        token: str,
        crc32s: Mapping[int, int] | None = None,
    ) -> S3Upload:
        """Go on with the multipart upload whose id is `token`; the server says which parts it has."""
        from holdfast.store.s3_upload import BegunUpload, S3Upload

        return S3Upload(
            self,
            self.key(name),
            record=self._record(write_id),
            nbytes=nbytes,
            part_bytes=part_bytes,
            write_id=write_id,
            begun=BegunUpload(token, crc32s or {}),
        )

    def sweep(self, keep: Keep = ()) -> builtins.list[str]:
        """Abort the open uploads that our records name, and remove what a broken check left."""
        temporary = [key for key, _ in self._keys(f"{self._prefix}{TEMPORARY}")]
        records = [key for key in temporary if key.startswith(f"{self._prefix}{_RECORD}")]
        kept_records = {key for key in records if is_kept(key.removeprefix(self._prefix), keep)}
        kept_keys = {self._recorded_key(record) for record in kept_records}
        removed = []
        for key in temporary:
            if key in kept_records:
                continue
            if key.startswith(f"{self._prefix}{_RECORD}"):
                recorded = self._recorded_key(key)
                if recorded is not None and recorded not in kept_keys:
                    removed += self.abort_uploads(recorded)
            self._delete(key)
            removed.append(f"temporary object {self._named(key)}")
        return removed

    def key(self, name: str) -> str:
        """The key of a name."""
        return self._prefix + check_name(name)

    def head(self, key: str) -> dict[str, Any]:
        """What the server knows of an object. Raises `StoreMissing`."""
        with translated("read", self._named(key)):
            return dict(self.client.head_object(Bucket=self._bucket, Key=key))

    def abort_uploads(self, key: str, *, only: str | None = None) -> builtins.list[str]:
        """Abort every open upload of exactly this key, or the one whose upload id is `only`. In words, what
        was aborted.
        """
        from botocore.exceptions import ClientError

        with translated("abort uploads of", self._named(key)):
            found = [only] if only else self._open_uploads(key)
            for upload_id in found:
                try:
                    self.client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload_id)
                except ClientError as error:
                    if code_of(error) not in ("NoSuchUpload", "404", "NoSuchKey"):
                        raise
        if only is None:
            self._strays.discard(key)
        return [f"open multipart upload of {self._named(key)}" for _ in found]

    def note_stray(self, key: str) -> None:
        """An upload of this key may be open that nobody will end: an answer was lost."""
        self._strays.add(key)

    def may_have_strays(self, key: str) -> bool:
        """Whether `note_stray` was called since all uploads of this key were last aborted."""
        return key in self._strays

    def list_parts(self, key: str, upload_id: str) -> builtins.list[PartTypeDef]:
        """The parts that an open upload has. Raises `StoreMissing` where the server does not know the upload."""
        from botocore.exceptions import ClientError

        unknown = StoreMissing(f"{self._named(key)}: no upload {upload_id[:80]!r} is open")
        if not _UPLOAD_ID.fullmatch(upload_id):
            raise unknown
        found: builtins.list[PartTypeDef] = []
        with translated("list the parts of", self._named(key)):
            pages = self.client.get_paginator("list_parts").paginate(
                Bucket=self._bucket,
                Key=key,
                UploadId=upload_id,
                PaginationConfig={"PageSize": _PARTS_PER_PAGE},
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

    def forget(self, record: str) -> None:
        """Remove the record of an upload that is over."""
        self._delete(record)

    def _record(self, write_id: str) -> str:
        return f"{self._prefix}{_RECORD}{check_write_id(write_id)}.json"

    def _open_uploads(self, key: str) -> builtins.list[str]:
        pages = self.client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=key)
        return [
            upload["UploadId"] for page in pages for upload in page.get("Uploads", []) if upload["Key"] == key
        ]

    def _recorded_key(self, record: str) -> str | None:
        """The key that a record names, if it can be read and lies in this run."""
        try:
            key = json.loads(self._get(record))["key"]
            return (
                self.key(str(key).removeprefix(self._prefix)) if str(key).startswith(self._prefix) else None
            )
        except (ValueError, KeyError, TypeError, RecursionError, StoreMissing) as error:
            _log.warning("the record %s of an upload cannot be read: %s", record, error)
            return None

    def _keys(self, prefix: str) -> builtins.list[tuple[str, int]]:
        with translated("list", self.url):
            pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix)
            return [(item["Key"], int(item["Size"])) for page in pages for item in page.get("Contents", [])]

    def _create_unconditionally(self, key: str, data: bytes) -> bool:
        try:
            self.head(key)
        except StoreMissing:
            self._put(key, data)
        return self._get(key) == data

    def _get(self, key: str) -> bytes:
        with (
            translated("read", self._named(key)),
            self.client.get_object(Bucket=self._bucket, Key=key)["Body"] as body,
        ):
            return bytes(body.read())

    def _put(self, key: str, data: bytes) -> None:
        with translated("write", self._named(key)):
            self._put_object(key, data)

    def _put_object(self, key: str, data: bytes, **condition: Any) -> None:
        self.client.put_object(
            Bucket=self._bucket, Key=key, Body=data, ChecksumCRC32=crc_header(crc32(data)), **condition
        )

    def _delete(self, key: str) -> None:
        with translated("delete", self._named(key)):
            self.client.delete_object(Bucket=self._bucket, Key=key)

    def _named(self, key: str) -> str:
        return f"s3://{self._bucket}/{key}"

    def _too_short(self, key: str, offset: int, end: int, got: int) -> DamageError:
        return DamageError(
            f"{self._named(key)}: bytes {offset} to {end} were expected, only {got} of them are there; "
            "the object is truncated, take another checkpoint"
        )
