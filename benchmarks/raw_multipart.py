"""Bare S3 server: the bytes of one image in one multipart upload, and in ranged reads."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
from botocore.config import Config

__all__ = ["MultipartWriter", "RangeReader"]


class MultipartWriter:
    """Uploads the same bytes repeatedly to the server that the environment names."""

    def __init__(self, bucket: str, nbytes: int, part_bytes: int) -> None:
        self._bucket, self._nbytes, self._part_bytes = bucket, nbytes, part_bytes
        self._client = _bare_client()
        self._part = os.urandom(part_bytes)

    def write(self, threads: int) -> float:
        """Upload, complete and remove.

        Returns:
            Seconds from the upload's first request to the answer of its completion.
        """
        where = {"Bucket": self._bucket, "Key": "raw.bin"}
        begin = time.monotonic()
        upload = self._client.create_multipart_upload(**where)["UploadId"]
        starts = range(0, self._nbytes, self._part_bytes)

        def send(number: int) -> dict[str, Any]:
            nbytes = min(self._part_bytes, self._nbytes - starts[number])
            body = self._part if nbytes == self._part_bytes else self._part[:nbytes]
            answer = self._client.upload_part(**where, UploadId=upload, PartNumber=number + 1, Body=body)
            return {"PartNumber": number + 1, "ETag": answer["ETag"]}

        with ThreadPoolExecutor(threads) as pool:
            parts = list(pool.map(send, range(len(starts))))
        self._client.complete_multipart_upload(**where, UploadId=upload, MultipartUpload={"Parts": parts})
        seconds = time.monotonic() - begin
        self._client.delete_object(**where)
        return seconds

    def close(self) -> None:
        self._client.close()


class RangeReader:
    """Reads one object repeatedly, each byte once, and discards the bytes."""

    def __init__(self, bucket: str, key: str, request_bytes: int) -> None:
        self._client = _bare_client()
        self._where, self._request_bytes = {"Bucket": bucket, "Key": key}, request_bytes
        self._nbytes = int(self._client.head_object(**self._where)["ContentLength"])

    def read(self, threads: int) -> float:
        """Return the seconds from the first request to the end of the last answer."""

        def get(begin: int) -> int:
            end = min(self._nbytes, begin + self._request_bytes)
            answer = self._client.get_object(**self._where, Range=f"bytes={begin}-{end - 1}")
            return len(answer["Body"].read())

        begin = time.monotonic()
        with ThreadPoolExecutor(threads) as pool:
            nbytes = sum(pool.map(get, range(0, self._nbytes, self._request_bytes)))
        seconds = time.monotonic() - begin
        assert nbytes == self._nbytes, (nbytes, self._nbytes)
        return seconds

    def close(self) -> None:
        self._client.close()


def _bare_client() -> Any:
    config = Config(
        s3={"addressing_style": "path"},
        max_pool_connections=16,
        request_checksum_calculation="when_required",  # bare: sign the bytes, add no checksums
        response_checksum_validation="when_required",
    )
    return boto3.session.Session().client("s3", config=config)
