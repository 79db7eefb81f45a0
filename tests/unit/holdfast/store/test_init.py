"""Which URL opens which store, its spelling, and where a run in a directory cannot be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import ConfigError, StoreError
from holdfast.store import (
    normalise_url,
    open_store,
    part_chunks_for,
    parts_at_once,
    require_parent,
)
from holdfast.store.generic import GenericStore
from holdfast.store.posix import PosixStore
from holdfast.store.retrying import Retrying
from holdfast.store.s3 import S3Store


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("/mnt/nfs/run", "/mnt/nfs/run"),
        ("/mnt//nfs/x/../run/", "/mnt/nfs/run"),
        ("file:///mnt/nfs/run/", "/mnt/nfs/run"),
        ("file://localhost/mnt/my%20run", "/mnt/my run"),
        ("s3://bucket/team/run", "s3://bucket/team/run"),
        ("S3://bucket//team/run/", "s3://bucket/team/run"),
        ("s3a://bucket/run", "s3://bucket/run"),
        ("s3://bucket", "s3://bucket"),
        ("memory://a/b/", "memory://a/b"),
        ("gs://bucket/run", "gs://bucket/run"),
        ("sftp://user@host/run", "sftp://user@host/run"),
    ],
)
def test_urls_of_a_run_have_a_single_spelling(url: str, expected: str) -> None:
    assert normalise_url(url) == expected
    assert normalise_url(expected) == expected


def test_relative_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert normalise_url("run") == str(tmp_path / "run")
    assert normalise_url("./x/../run") == str(tmp_path / "run")
    assert normalise_url("odd:name") == str(tmp_path / "odd:name")


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIDEXAMPLE:hunter2@bucket/run",
        "s3://hunter2@bucket/run",
        "sftp://user:hunter2@host/run",
        "s3://bucket/run?X-Amz-Signature=hunter2",
        "abfs://container/run?sig=hunter2",
    ],
)
def test_secrets_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert "hunter2" not in str(caught.value)
    assert "AKID" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "",
        " /mnt/run",
        "a\0b",
        "s3://",
        "s3:///run",
        "s3://UPPER_case!/run",
        "file://host/run",
        "s3://bucket/a/../b",
    ],
)
def test_malformed_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        open_store(url)


def test_a_scheme_nobody_knows_is_named() -> None:
    with pytest.raises(ConfigError, match="'kelp'"):
        open_store("kelp://forest/run")


def test_a_driver_that_is_not_installed_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'gs'.*gcsfs"):
        open_store("gs://bucket/run")


def test_each_url_opens_its_store_with_retries(tmp_path: Path) -> None:
    for url, kind in (
        (str(tmp_path), PosixStore),
        ("s3://bucket/run", S3Store),
        ("memory://x/run", GenericStore),
    ):
        store = open_store(url)
        assert isinstance(store, Retrying)
        assert isinstance(store.inner, kind)
        assert store.url == url


def test_local_stores_import_neither_boto3_nor_fsspec() -> None:
    code = (
        "import sys; from holdfast.store import open_store; open_store('/tmp/x'); "
        "print([name for name in ('boto3', 'botocore', 'fsspec', 's3fs') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_object_stores_are_sent_more_parts_at_once_than_a_disk() -> None:
    disk, s3, other = (parts_at_once(url) for url in ("/mnt/nfs/run", "s3://bucket/run", "gs://bucket/run"))
    assert parts_at_once("file:///mnt/nfs/run") == disk
    assert 1 < disk < other < s3


def test_a_file_system_that_is_not_mounted_is_named(tmp_path: Path) -> None:
    run = tmp_path / "nfs" / "team" / "run"
    with pytest.raises(StoreError) as caught:
        require_parent(str(run), create=False)
    for words in (str(run), f"no directory {run.parent}", f"exists is {tmp_path}", "mounted", "--create"):
        assert words in str(caught.value)
    assert not caught.value.retriable
    assert not (tmp_path / "nfs").exists()


def test_a_new_run_beside_others_and_an_old_one_are_fine(tmp_path: Path) -> None:
    require_parent(str(tmp_path / "run"), create=False)
    require_parent(f"file://{tmp_path}/run", create=False)
    require_parent(str(tmp_path), create=False)


def test_a_missing_parent_is_made_on_request(tmp_path: Path) -> None:
    require_parent(str(tmp_path / "a" / "b" / "run"), create=True)


def test_only_paths_are_looked_at() -> None:
    require_parent("s3://no-such-bucket/a/run", create=False)
    require_parent("memory://a/b/run", create=False)


def test_a_file_in_the_way_is_left_to_the_stores_own_check(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    require_parent(str(tmp_path / "file" / "a" / "run"), create=False)


def test_the_size_of_parts_is_known_without_asking_the_store(tmp_path: Path) -> None:
    image_bytes, chunk_bytes = 3 * 4096 + 5, 4096
    sizes = {"nbytes": image_bytes, "chunk_bytes": chunk_bytes}
    for url in (str(tmp_path / "run"), "memory://shares/run"):
        upload = open_store(url).begin("step-000000001.pt", **sizes, write_id="one")
        assert (
            upload.part_bytes == part_chunks_for(url, image_bytes, chunk_bytes) * chunk_bytes == chunk_bytes
        )
        upload.abort()
    assert part_chunks_for("s3://bucket/run", 100_000 << 20, 8 << 20) == 4
