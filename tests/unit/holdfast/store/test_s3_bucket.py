"""An object read whole from a bucket: by the server's stated size, and by the received bytes."""

from __future__ import annotations

import io
from typing import Any

import pytest

from holdfast.errors import DamageError
from holdfast.store.s3_bucket import S3Bucket


class _Server:
    """Answers each GET with one body.

    Attributes:
        read_bytes: Bytes read from the body.
    """

    def __init__(self, body: bytes, told_bytes: int | None) -> None:
        self._body, self._told_bytes = body, told_bytes
        self.read_bytes = 0

    def get_object(self, **_: Any) -> dict[str, Any]:
        server = self

        class Body(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                data = super().read(size)
                server.read_bytes += len(data)
                return data

        told = {} if self._told_bytes is None else {"ContentLength": self._told_bytes}
        return {"Body": Body(self._body), **told}


def _bucket(server: _Server) -> S3Bucket:
    bucket = S3Bucket("bucket")
    bucket._client = server  # type: ignore[assignment]
    return bucket


def test_an_object_too_large_by_its_header_is_not_read() -> None:
    server = _Server(b"", 1 << 40)
    with pytest.raises(
        DamageError, match=r"s3://bucket/key: 1099511627776 bytes, expected at most 100; not read"
    ):
        _bucket(server).get("key", 100)
    assert server.read_bytes == 0


def test_an_object_without_a_size_is_read_no_further_than_it_may() -> None:
    server = _Server(bytes(8 << 20), None)
    with pytest.raises(DamageError, match="expected at most 100"):
        _bucket(server).get("key", 100)
    assert server.read_bytes < 1 << 20


def test_an_object_of_the_right_size_is_read_whole() -> None:
    data = bytes(range(250)) * 4000
    assert _bucket(_Server(data, len(data))).get("key", len(data)) == data
