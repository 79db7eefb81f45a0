"""The backends under test: a store each, and a way to find its unfinished files."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, cast

import fsspec
import pytest

from holdfast.store import open_store
from holdfast.store.base import Store
from holdfast.store.retrying import Retrying
from tests.support.s3_place import S3Place, plain_client


class Backend(NamedTuple):
    """A backend under test.

    Attributes:
        store: The store, opened by `open_store`.
        again: Opens the same run once more, as another process would.
        leftovers: Lists unfinished files: temporary ones, open uploads.
    """

    name: str
    store: Store
    again: Callable[[], Store]
    leftovers: Callable[[], list[str]]


@pytest.fixture(
    params=[
        "posix",
        "memory",
        pytest.param("swift", marks=pytest.mark.s3),
        pytest.param("moto", marks=pytest.mark.s3),
    ]
)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    """Provide each backend in turn, with an empty run."""
    name = str(request.param)
    if name == "posix":
        url, leftovers = (
            str(tmp_path / "run"),
            lambda: [str(path) for path in (tmp_path / "run/.holdfast/tmp").glob("*")],
        )
    elif name == "memory":
        place = f"{secrets.token_hex(6)}/run"
        url, leftovers = f"memory://{place}", lambda: _in_memory(place)
    else:
        s3 = cast(S3Place, request.getfixturevalue(f"{name}_s3"))
        url, leftovers = s3.url("team/run"), lambda: _in_bucket(s3.bucket)
    opened: list[Store] = []

    def again() -> Store:
        opened.append(open_store(url))
        return opened[-1]

    yield Backend(name, again(), again, leftovers)
    for store in opened:
        cast(Retrying, store).close()


def _in_memory(place: str) -> list[str]:
    memory = fsspec.filesystem("memory")  # type: ignore[no-untyped-call]
    found: list[str] = memory.find(f"/{place}/.holdfast/tmp")
    return found


def _in_bucket(bucket: str) -> list[str]:
    client = plain_client()
    try:
        keys = [item["Key"] for item in client.list_objects_v2(Bucket=bucket).get("Contents", [])]
        uploads = [
            upload["Key"] for upload in client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
        ]
    finally:
        client.close()
    return [key for key in keys if "/.holdfast/tmp/" in key] + [f"upload of {key}" for key in uploads]
