"""Upload of a big object to S3: one multipart upload.

    Create ─► UploadPart ... ─► Complete ─► HEAD: ours ─► published
                 └── resume: HEAD: ours? else ListParts, then the parts that are missing

Every part carries the CRC-32 that the flusher computed, so the server refuses a flipped bit. `publish` trusts no
answer: after Complete, or after its answer was lost, HEAD must show our size and our write-id, else the object is not
ours.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, cast

from holdfast.errors import StoreError, StoreMissing
from holdfast.faultpoint import Point, reach
from holdfast.store.base import InterruptedUpload
from holdfast.store.parts import BaseUpload
from holdfast.store.s3_bucket import S3Bucket
from holdfast.store.s3_client import crc_header

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef, PartTypeDef

_log = logging.getLogger("holdfast.store.s3")

_WRITE_ID = "holdfast-write-id"
_PARTS_MAX = 10_000
_PART_BYTES_MIN = 5 << 20
_PART_BYTES_MAX = 5 << 30
_PARTS_WANTED = 256  # two for each of 128 connections, so that they end at nearly the same time
_PART_BYTES_WANTED_MAX = 32 << 20  # larger ones leave connections idle where the ring is small
_PART_CHUNKS_WANTED_MAX = 4  # a part waits in the ring until it is whole; the smallest ring has eight chunks
_IDLE_SECONDS_MAX = 300.0
_CLEANUP_FAILURES_MAX = 6
# An HTTP client asks for 16 KiB at a time, and each costs a turn of Python and a system call. Not the whole view: one
# call must end within the client's timeout (10 s), even over a slow link.
_READ_BYTES_MIN = 1 << 20


def part_bytes_for(nbytes: int, chunk_bytes: int) -> int:
    """Return the part size for an image, a multiple of `chunk_bytes`. A 256th of the image keeps all connections busy
    to the end, but at most 32 MiB and four chunks; more only as far as S3 demands: at least 5 MiB, and at most 10,000
    parts. Raises `StoreError` if 5 GiB parts are too small, or a size is not positive.
    """
    if nbytes <= 0 or chunk_bytes <= 0:
        raise StoreError(f"cannot upload {nbytes} bytes in chunks of {chunk_bytes}; both must be at least 1")
    least = max(_PART_BYTES_MIN, -(-nbytes // _PARTS_MAX))
    least_chunks = -(-least // chunk_bytes)
    wanted_chunks = min(nbytes // _PARTS_WANTED, _PART_BYTES_WANTED_MAX) // chunk_bytes
    part_bytes = max(least_chunks, min(wanted_chunks, _PART_CHUNKS_WANTED_MAX)) * chunk_bytes
    if part_bytes > _PART_BYTES_MAX:
        raise StoreError(
            f"{nbytes} bytes in chunks of {chunk_bytes} need parts of {part_bytes} bytes; S3 takes at most "
            f"{_PARTS_MAX} parts of {_PART_BYTES_MAX} bytes"
        )
    return part_bytes


class S3Upload(BaseUpload):
    """One multipart upload. `write_part`: any thread. `record`: key of the record that names this upload for a sweep.
    `part_bytes`: from `part_bytes_for`. `write_id`: kept as metadata. `interrupted`: of another process, to be resumed.
    Raises `StoreMissing` if the server does not know it.
    """

    def __init__(
        self,
        bucket: S3Bucket,
        key: str,
        *,
        record: str,
        nbytes: int,
        part_bytes: int,
        write_id: str,
        interrupted: InterruptedUpload | None = None,
    ) -> None:
        self._bucket, self._key, self._record, self._write_id = bucket, key, record, write_id
        self._name = bucket.url(key)
        super().__init__(self._name, nbytes=nbytes, part_bytes=part_bytes)
        self._sent: dict[int, CompletedPartTypeDef] = {}
        self._lock = threading.Lock()
        self._completed = self._is_cleaned_up = False
        self._cleanup_failures = 0
        self._resumed = interrupted is not None
        if interrupted is None:
            self._upload_id = self._begin()
        else:
            self._upload_id = interrupted.token
            self._resume(interrupted.crc32s)

    @property
    def token(self) -> str:
        return self._upload_id

    def write_part(self, index: int, buffers: Sequence[memoryview], crc32: int) -> None:
        """Send a part; the server refuses it if its bytes do not have this CRC-32."""
        with (
            self._ledger.track_part(index, buffers),
            self._bucket.translate_errors(f"send part {index} of", self._key),
        ):
            response = self._bucket.client.upload_part(
                Bucket=self._bucket.name,
                Key=self._key,
                UploadId=self._upload_id,
                PartNumber=index + 1,
                Body=cast(IO[bytes], ViewsBody(buffers)),
                ChecksumCRC32=crc_header(crc32),
            )
            with self._lock:
                # AWS refuses to complete without the CRC of every part.
                self._sent[index] = {
                    "PartNumber": index + 1,
                    "ETag": response["ETag"],
                    "ChecksumCRC32": crc_header(crc32),
                }

    def publish(self) -> None:
        """Complete the upload and check by HEAD that the object is ours. May be repeated after a retriable error."""
        if self._published:
            self._clean_up()
            return
        self._ledger.require_complete()
        if not self._completed:
            try:
                self._complete()
            except StoreError as error:
                # The answer may have been lost: then the upload is unknown, and the object is there.
                if not self._is_ours():
                    raise
                _log.info(
                    "%s: the upload was completed, although the server's answer was lost (%s)",
                    self._name,
                    error,
                )
            self._completed = True
            reach(Point.FILE_NAMED)
        if not self._is_ours():
            raise StoreError(
                f"{self._name}: the upload is completed, but the object there has another size or write-id; the server "
                "is late, or two writers use this run; begin a new upload",
                retriable=True,
                begin_anew=True,
            )
        self._published = True
        self._clean_up()

    def abort(self) -> None:
        """Abort the upload, once no part is in flight: S3 keeps, and bills, a part that arrives after the abort."""
        if self._published:
            return
        self._ledger.close()
        if not self._ledger.wait_idle(_IDLE_SECONDS_MAX):
            _log.warning("%s: the upload is aborted while a part is still being sent", self._name)
        try:
            self._bucket.abort_uploads(self._key, only=self._upload_id)
        except StoreError:
            self._bucket.note_stray(self._key)
            raise
        self._clean_up()

    def _begin(self) -> str:
        try:
            with self._bucket.translate_errors("begin upload of", self._key):
                return self._bucket.client.create_multipart_upload(
                    Bucket=self._bucket.name,
                    Key=self._key,
                    Metadata={_WRITE_ID: self._write_id},
                    ChecksumAlgorithm="CRC32",
                )["UploadId"]
        except StoreError:
            self._bucket.note_stray(self._key)
            raise

    def _resume(self, crc32s: Mapping[int, int]) -> None:
        """Ask the server for the object, then for its parts. If the upload is unknown, ask for the object again: the
        dead process's Complete may have ended between the two questions.
        """
        if not self._is_ours():
            try:
                listed = self._bucket.list_parts(self._key, self._upload_id)
            except StoreMissing as error:
                if not self._is_ours():
                    raise StoreMissing(
                        f"{self._name}: there is nothing to resume as upload {self._upload_id[:80]!r}: the server "
                        "knows no such upload (a lifecycle rule, a sweep or a second writer aborted it), and the "
                        "object is not this write; start over",
                        begin_anew=True,
                    ) from error
            else:
                self._adopt_parts(listed, crc32s)
                return
        self._ledger.mark_all_present()
        self._completed = self._published = True
        self._clean_up()

    def _adopt_parts(self, listed: Sequence[PartTypeDef], crc32s: Mapping[int, int]) -> None:
        for part in listed:
            index = part["PartNumber"] - 1
            if not 0 <= index < self._ledger.parts:
                continue
            expected_bytes, crc32 = self._ledger.place(index).nbytes, crc32s.get(index)
            expected = part.get("ChecksumCRC32") if crc32 is None else crc_header(crc32)
            if part["Size"] != expected_bytes or part.get("ChecksumCRC32", expected) != expected:
                _log.warning(
                    "%s: part %d at the server has %d bytes and CRC-32 %s, expected %d and %s; it does not count",
                    self._name,
                    index,
                    part["Size"],
                    part.get("ChecksumCRC32", "unknown"),
                    expected_bytes,
                    expected or "any",
                )
                continue
            self._sent[index] = {"PartNumber": index + 1, "ETag": part["ETag"]}
            if expected is not None:
                self._sent[index]["ChecksumCRC32"] = expected
            self._ledger.mark_present([index])

    def _complete(self) -> None:
        parts = [self._sent[index] for index in range(self._ledger.parts)]
        with self._bucket.translate_errors("publish", self._key):
            self._bucket.client.complete_multipart_upload(
                Bucket=self._bucket.name,
                Key=self._key,
                UploadId=self._upload_id,
                MultipartUpload={"Parts": parts},
            )

    def _is_ours(self) -> bool:
        try:
            head = self._bucket.head(self._key)
        except StoreMissing:
            return False
        metadata = {str(name).lower(): value for name, value in head.get("Metadata", {}).items()}
        return head["ContentLength"] == self._ledger.nbytes and metadata.get(_WRITE_ID) == self._write_id

    def _clean_up(self) -> None:
        """Remove the record, and other uploads of this key, which lost answers may have left. The server's list, which
        is slow, is asked only if there may be some. After a few failures leftovers stay for the next sweep: a published
        checkpoint must not wait for them. Raises a retriable `StoreError`; the same call continues here.
        """
        self._ledger.close()
        if self._is_cleaned_up:
            return
        try:
            if self._resumed or self._bucket.may_have_strays(self._key):
                self._bucket.abort_uploads(self._key)
            self._bucket.delete(self._record)
        except StoreError as error:
            self._cleanup_failures += 1
            if error.retriable and self._cleanup_failures < _CLEANUP_FAILURES_MAX:
                raise
            _log.warning("%s: leftovers of its upload stay until the next sweep: %s", self._name, error)
        self._is_cleaned_up = True


class ViewsBody:
    """Body of a request: several memory views as one read-only file, for one thread. Joining the chunks of a part would
    copy every byte of the checkpoint again, on the cheapest machine of the cluster.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._views = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        self._starts: list[int] = []
        total = 0
        for view in self._views:
            self._starts.append(total)
            total += view.nbytes
        self._total, self._position = total, 0
        self._current = 0

    def __len__(self) -> int:
        return self._total

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Seek as in a file, but neither before the start nor beyond the end."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._total}[whence]
        self._position = min(max(base + offset, 0), self._total)
        self._current = 0
        return self._position

    def read(self, size: int = -1) -> memoryview:
        """Return up to `size` bytes, or 1 MiB if that is more, as a view of the memory; fewer at a buffer's end."""
        while self._current < len(self._views):
            view = self._views[self._current]
            inside = self._position - self._starts[self._current]
            if inside < view.nbytes:
                piece = view[inside:] if size < 0 else view[inside : inside + max(size, _READ_BYTES_MIN)]
                self._position += piece.nbytes
                return piece
            self._current += 1
        return memoryview(b"")
