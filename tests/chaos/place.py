"""Stores for the scenarios of the matrix, with a look behind them: a directory, or a bucket of a real S3 server."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tests.faults.failing_disk import Calls
from tests.support.s3_place import S3Place, plain_client

__all__ = ["BucketPlace", "DirectoryPlace", "GrowingPlace", "Place", "RefusingPlace"]


class Place(Protocol):
    """One run's store, with the access that a scenario needs."""

    @property
    def url(self) -> str:
        """Store URL of the run."""
        ...

    @property
    def settings(self) -> tuple[str, ...]:
        """Sizes of ring and chunks for which an image has several parts here."""
        ...

    @property
    def env(self) -> Mapping[str, str]:
        """Variables that the processes need to reach the store, and the size of the state."""
        ...

    def objects(self) -> set[str]:
        """Every object of the run, hidden ones too."""
        ...

    def open_uploads(self) -> list[str]:
        """Uploads begun and not ended, which no listing of objects shows."""
        ...

    def fetch(self, name: str, into: Path) -> Path:
        """Copy a file of the run to a plain file."""
        ...

    def put(self, files: Sequence[Path]) -> None:
        """Place copies of files in the run, each under its own name."""
        ...


class DirectoryPlace:
    """A directory: 23 chunks of 64 KiB, each a part."""

    settings: tuple[str, ...] = ("--chunk-bytes", "64KiB", "--ring-bytes", "4MiB")
    size: Mapping[str, str] = {"CHAOS_WIDTH": "3200"}
    # 3,201 rows: one rank has one more than the other.
    split_size: Mapping[str, str] = {"CHAOS_WIDTH": "3201", "CHAOS_SPLIT": "1"}

    def __init__(self, directory: Path, *, split: bool = False) -> None:
        self._directory = directory
        self.url, self.env = str(directory), self.split_size if split else self.size

    def objects(self) -> set[str]:
        """As `Place`."""
        return {
            str(path.relative_to(self._directory)) for path in self._directory.rglob("*") if path.is_file()
        }

    def open_uploads(self) -> list[str]:
        """None: a directory holds half-written files under hidden names, which `objects` shows."""
        return []

    def fetch(self, name: str, into: Path) -> Path:
        """As `Place`."""
        return self._directory / name

    def put(self, files: Sequence[Path]) -> None:
        """As `Place`."""
        self._directory.mkdir(exist_ok=True)
        for file in files:
            shutil.copy(file, self._directory)


class RefusingPlace(DirectoryPlace):
    """A directory on a disk without room for checkpoints until `mend`. Small files find room."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._calls = Calls(directory.with_name("shim"), directory)
        self._calls.fail("fallocate", errno.ENOSPC)
        self.env = {**self.size, **self._calls.environment}

    def mend(self) -> None:
        """Make room."""
        self._calls.clear()


class GrowingPlace(DirectoryPlace):
    """A directory, and a ring that grows: the initial 256 MiB do not suffice for two images of 31 chunks of 4 MiB."""

    settings = ("--chunk-bytes", "4MiB")
    first_chunks = 64
    size: Mapping[str, str] = {"CHAOS_WIDTH": "300000"}


class BucketPlace:
    """A bucket on a real S3 server: 12.5 MB in parts of 5 MiB, five chunks each."""

    settings = ("--chunk-bytes", "1MiB", "--ring-bytes", "24MiB")
    size: Mapping[str, str] = {"CHAOS_WIDTH": "28000"}

    def __init__(self, place: S3Place) -> None:
        self._place = place
        self.url = place.url()
        self.env: Mapping[str, str] = {**place.environment, **self.size}

    def objects(self) -> set[str]:
        """As `Place`."""
        client = plain_client()
        try:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=self._place.bucket)
            keys = {found["Key"] for page in pages for found in page.get("Contents", [])}
        finally:
            client.close()
        return {key.removeprefix("run/") for key in keys}

    def open_uploads(self) -> list[str]:
        """As `Place`."""
        client = plain_client()
        try:
            found = client.list_multipart_uploads(Bucket=self._place.bucket).get("Uploads", [])
        finally:
            client.close()
        return [f"{upload['Key']} ({upload['UploadId']})" for upload in found]

    def fetch(self, name: str, into: Path) -> Path:
        """As `Place`."""
        path = into / name
        client = plain_client()
        try:
            client.download_file(self._place.bucket, f"run/{name}", str(path))
        finally:
            client.close()
        return path

    def put(self, files: Sequence[Path]) -> None:
        """As `Place`."""
        client = plain_client()
        try:
            for file in files:
                client.upload_file(str(file), self._place.bucket, f"run/{file.name}")
        finally:
            client.close()
