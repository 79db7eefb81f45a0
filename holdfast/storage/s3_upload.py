"""A big object on its way into S3: one multipart upload.

Every part carries the CRC-32 that the flusher computed, so a flipped bit is refused by the server. `publish`
trusts no answer: after Complete, or after its answer was lost, HEAD must show our size and our write-id, else
the object is not ours.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, cast

from holdfast.errors import StoreError, StoreMissing
from holdfast.storage.body import ViewsBody
from holdfast.storage.ledger import PartLedger
from holdfast.storage.s3_client import crc_header
from holdfast.storage.s3_errors import translated

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef

    from holdfast.storage.s3 import S3Store

__all__ = ["S3Upload", "part_bytes_for"]

_log = logging.getLogger("holdfast.storage.s3")

_WRITE_ID = "holdfast-write-id"
_PARTS_MAX = 10_000
_PART_BYTES_MIN = 5 << 20
_PART_BYTES_MAX = 5 << 30
_IDLE_SECONDS_MAX = 300.0


def part_bytes_for(nbytes: int, chunk_bytes: int) -> int:
    """The smallest multiple of `chunk_bytes` that S3 takes as a part and that needs at most 10,000 parts.

    Raises:
        StoreError: Not even 5 GiB parts would do, or a size is not positive.
    """
    if nbytes <= 0 or chunk_bytes <= 0:
        raise StoreError(f"cannot upload {nbytes} bytes in chunks of {chunk_bytes}; both must be at least 1")
    least = max(_PART_BYTES_MIN, -(-nbytes // _PARTS_MAX))
    part_bytes = -(-least // chunk_bytes) * chunk_bytes
    if part_bytes > _PART_BYTES_MAX:
        raise StoreError(
            f"{nbytes} bytes in chunks of {chunk_bytes} need parts of {part_bytes} bytes; S3 takes at most "
            f"{_PARTS_MAX} parts of {_PART_BYTES_MAX} bytes"
        )
    return part_bytes


class S3Upload:
    """One multipart upload. `write_part` may be called from any thread.

    Args:
        store: The run.
        key: Key of the object.
        record: Key of the record that names this upload for a sweep.
        nbytes: Size of the object.
        part_bytes: Size of every part but the last; from `part_bytes_for`.
        write_id: Kept as metadata of the object; tells it from another writer's.
    """

    def __init__(
        self, store: S3Store, key: str, *, record: str, nbytes: int, part_bytes: int, write_id: str
    ) -> None:
        self._store, self._key, self._record, self._write_id = store, key, record, write_id
        self._bucket = store.bucket
        self._name = f"s3://{self._bucket}/{key}"
        self._ledger = PartLedger(self._name, nbytes=nbytes, part_bytes=part_bytes)
        self._sent: dict[int, CompletedPartTypeDef] = {}
        self._noting = threading.Lock()
        self._completed = self._published = False
        with translated("begin upload of", self._name):
            answer = store.client.create_multipart_upload(
                Bucket=self._bucket, Key=key, Metadata={_WRITE_ID: write_id}, ChecksumAlgorithm="CRC32"
            )
        self._upload_id = answer["UploadId"]

    @property
    def part_bytes(self) -> int:
        """Size of every part but the last."""
        return self._ledger.part_bytes

    def write_part(self, index: int, buffers: Sequence[memoryview], crc32: int) -> None:
        """Send a part; the server refuses it if its bytes do not have this CRC-32."""
        with self._ledger.entry(index, buffers), translated(f"send part {index} of", self._name):
            answer = self._store.client.upload_part(
                Bucket=self._bucket,
                Key=self._key,
                UploadId=self._upload_id,
                PartNumber=index + 1,
                Body=cast(IO[bytes], ViewsBody(buffers)),
                ChecksumCRC32=crc_header(crc32),
            )
            with self._noting:
                # AWS wants the CRC of every part once more at the end, or it refuses to complete.
                self._sent[index] = {
                    "PartNumber": index + 1,
                    "ETag": answer["ETag"],
                    "ChecksumCRC32": crc_header(crc32),
                }

    def publish(self) -> None:
        """Complete the upload and see by HEAD that the object is ours. May be called again after a retriable
        error.
        """
        if self._published:
            return
        self._ledger.require_complete()
        if not self._completed:
            try:
                self._complete()
            except StoreError as error:
                # The answer may have been lost after the deed: then the upload is unknown, and the object
                # stands there.
                if not self._is_ours():
                    raise
                _log.info("%s: completed, though its answer was lost (%s)", self._name, error)
            self._completed = True
        if not self._is_ours():
            raise StoreError(
                f"{self._name}: completed, but what stands there is not this write (size or write-id differ); "
                "the server is late, or two writers use this run",
                retriable=True,
            )
        self._published = True
        self._end()

    def abort(self) -> None:
        """Abort the upload. Waits for parts under way first: S3 keeps, and bills, a part that arrives after
        the abort.
        """
        if self._published:
            return
        self._ledger.close()
        if not self._ledger.wait_idle(_IDLE_SECONDS_MAX):
            _log.warning("%s: aborting while a part is still being sent", self._name)
        self._store.abort_uploads(self._key, only=self._upload_id)
        self._end()

    def _complete(self) -> None:
        parts = [self._sent[index] for index in range(self._ledger.parts)]
        with translated("publish", self._name):
            self._store.client.complete_multipart_upload(
                Bucket=self._bucket, Key=self._key, UploadId=self._upload_id, MultipartUpload={"Parts": parts}
            )

    def _is_ours(self) -> bool:
        try:
            head = self._store.head(self._key)
        except StoreMissing:
            return False
        metadata = {str(name).lower(): value for name, value in head.get("Metadata", {}).items()}
        return head["ContentLength"] == self._ledger.nbytes and metadata.get(_WRITE_ID) == self._write_id

    def _end(self) -> None:
        """Nothing may stay: also not the twin of this upload that a lost answer to its beginning left."""
        self._ledger.close()
        try:
            self._store.abort_uploads(self._key)
        except StoreError as error:
            _log.warning("%s: open uploads of it could not be swept: %s", self._name, error)
            return  # the record stays, for the next sweep
        self._store.forget(self._record)
