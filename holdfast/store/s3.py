"""A run under a prefix of an S3 bucket, on AWS or any server that speaks S3.

A record (`.holdfast/tmp/upload-<write-id>.json`) is written before each upload and names its key: S3 lists open uploads
without their metadata, and a sweep must not touch other programs' uploads under the same prefix.
"""

from __future__ import annotations

import builtins
import json
import logging
import secrets
import threading

from holdfast.errors import DamageError, StoreMissing
from holdfast.store.base import SMALL_BYTES_MAX, InterruptedUpload, ObjectInfo
from holdfast.store.names import TEMPORARY, Keep, check_name, check_write_id, is_kept
from holdfast.store.s3_bucket import S3Bucket
from holdfast.store.s3_upload import S3Upload, part_bytes_for

_log = logging.getLogger("holdfast.store.s3")

_REQUEST_BYTES = 16 << 20  # a request costs money and a round trip

_RECORD = f"{TEMPORARY}upload-"
_RECORD_BYTES_MAX = 1 << 16


class S3Store:
    """A bucket's prefix as a store. Any thread. No network before the first call. `prefix`: no slash at its ends."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self.bucket = S3Bucket(bucket)
        self._prefix = f"{prefix}/" if prefix else ""
        self._check_name = f"check-{secrets.token_hex(8)}"

    @property
    def url(self) -> str:
        return self.bucket.url(self._prefix).rstrip("/")

    @property
    def request_bytes(self) -> int:
        return _REQUEST_BYTES

    def close(self) -> None:
        self.bucket.close()

    def check(self, *, write: bool) -> None:
        self.bucket.check(self._prefix)
        if not write:
            return
        # A retry uses the same name: it overwrites, and deletes, an object whose deletion failed.
        key = f"{self._prefix}{TEMPORARY}{self._check_name}-{threading.get_ident()}"
        data = b"holdfast check\n"
        self.bucket.put(key, data)
        try:
            back = self.bucket.get(key, _RECORD_BYTES_MAX)
        finally:
            self.bucket.delete(key)
        if back != data:
            raise DamageError(
                f"{self.bucket.url(key)}: the server returned other bytes than were written; repair the server first"
            )

    def list(self) -> list[ObjectInfo]:
        found = []
        for key, nbytes in self.bucket.sizes(self._prefix):
            name = key[len(self._prefix) :]
            if name and not name.endswith("/") and not name.startswith(TEMPORARY):
                found.append(ObjectInfo(name, nbytes))
        return sorted(found)

    def size(self, name: str) -> int:
        return int(self.bucket.head(self._key(name))["ContentLength"])

    def read(self, name: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        return self.bucket.get(self._key(name), bytes_max)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        key = self._key(name)
        if buffer.nbytes:
            self.bucket.get_into(key, offset, buffer.cast("B"))

    def write(self, name: str, data: bytes) -> None:
        self.bucket.put(self._key(name), data)

    def create(self, name: str, data: bytes) -> bool:
        return self.bucket.create(self._key(name), data)

    def delete(self, name: str) -> None:
        self.bucket.delete(self._key(name))

    retire = delete

    def begin(self, name: str, *, nbytes: int, chunk_bytes: int, write_id: str) -> S3Upload:
        """Start a multipart upload, even of a small image: one path, always tested."""
        key, record = self._key(name), self._record_key(write_id)
        part_bytes = part_bytes_for(nbytes, chunk_bytes)
        self.bucket.put(record, json.dumps({"key": key, "write_id": write_id}).encode())
        return S3Upload(
            self.bucket, key, record=record, nbytes=nbytes, part_bytes=part_bytes, write_id=write_id
        )

    def resume(self, name: str, interrupted: InterruptedUpload) -> S3Upload:
        """Resume the multipart upload whose id is the token; the server says which parts it has."""
        return S3Upload(
            self.bucket,
            self._key(name),
            record=self._record_key(interrupted.write_id),
            nbytes=interrupted.nbytes,
            part_bytes=interrupted.part_bytes,
            write_id=interrupted.write_id,
            interrupted=interrupted,
        )

    def sweep(self, keep: Keep = ()) -> builtins.list[str]:
        """Abort the open uploads that our records name, and remove leftovers of an interrupted check."""
        temporary = [key for key, _ in self.bucket.sizes(f"{self._prefix}{TEMPORARY}")]
        records = [key for key in temporary if key.startswith(f"{self._prefix}{_RECORD}")]
        kept_records = {key for key in records if is_kept(key.removeprefix(self._prefix), keep)}
        kept_keys = {self._read_upload_key(record) for record in kept_records}
        removed = []
        for key in temporary:
            if key in kept_records:
                continue
            if key.startswith(f"{self._prefix}{_RECORD}"):
                recorded = self._read_upload_key(key)
                if recorded is not None and recorded not in kept_keys:
                    removed += self.bucket.abort_uploads(recorded)
            self.bucket.delete(key)
            removed.append(f"temporary object {self.bucket.url(key)}")
        return removed

    def _key(self, name: str) -> str:
        return self._prefix + check_name(name)

    def _record_key(self, write_id: str) -> str:
        return f"{self._prefix}{_RECORD}{check_write_id(write_id)}.json"

    def _read_upload_key(self, record: str) -> str | None:
        """Return the key that a record names; None if it is unreadable or outside this run."""
        try:
            key = str(json.loads(self.bucket.get(record, _RECORD_BYTES_MAX))["key"])
            return self._key(key.removeprefix(self._prefix)) if key.startswith(self._prefix) else None
        except (ValueError, KeyError, TypeError, RecursionError, StoreMissing, DamageError) as error:
            _log.warning("the record %s of an upload cannot be read: %s", record, error)
            return None
