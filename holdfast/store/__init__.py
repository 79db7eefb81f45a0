"""Stores for checkpoints: POSIX, S3 and the rest of fsspec behind one interface.

    open_store(url) ─► Retrying ─► PosixStore     /mnt/nfs/run, file:///mnt/nfs/run
                               ├─► S3Store        s3://bucket/run
                               └─► GenericStore   any other URL that fsspec knows

boto3 and fsspec are imported only when a store needs them, so that tools on local files start quickly.

base, names                      the interface that the conformance suite checks; valid names inside a run
wrapper, retrying, guarded       a store that wraps another: the base class, retries, a check of the lease before writes
parts                            base of all uploads: which parts are written, and whether the upload is open
concurrency                      limits requests in flight
ranged                           an object as a read-only file

posix, posix_upload              a run in a directory; one upload
posix_io, posix_errors           the system calls below both; their errors
file_system, spare_room          the file system of a path; reuses the blocks of removed checkpoints
s3, s3_upload                    a run in a bucket; one upload
s3_bucket, s3_client, s3_errors    the requests below both; the boto3 client; their errors
generic, generic_upload          a run in any other file system of fsspec; one upload
generic_folder                   the calls below both
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from holdfast.errors import ConfigError, StoreError
from holdfast.store.base import Store

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//|(?=.*://))")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,62}")
_LOCAL = ("", "file", "local")
_S3 = ("s3", "s3a")

# One direct write keeps a disk busy; a second one is ready when it ends. A connection to an object store mostly waits.
_PARTS_LOCAL, _PARTS_S3, _PARTS_OTHER = 2, 8, 4


def open_store(url: str) -> Store:
    """Open the store of the run at `url`, with retries; no network. `url`: a local path, `file:///path`,
    `s3://bucket/prefix`, or any URL with an installed fsspec driver. Raises `ConfigError`: malformed, holds a password,
    or has no driver.
    """
    from holdfast.store.retrying import Retrying

    normal = normalise_url(url)
    scheme = _scheme(normal)
    if scheme in _LOCAL:
        from holdfast.store.posix import PosixStore

        return Retrying(PosixStore(Path(normal)))
    if scheme in _S3:
        from holdfast.store.s3 import S3Store

        bucket, _, prefix = normal.removeprefix("s3://").partition("/")
        return Retrying(S3Store(bucket, prefix))
    from holdfast.store.generic import GenericStore

    return Retrying(GenericStore(normal))


def is_local(url: str) -> bool:
    """Whether the store at `url` is a directory."""
    return _scheme(normalise_url(url)) in _LOCAL


def is_s3(url: str) -> bool:
    """Whether the store at `url` is an S3 bucket."""
    return _scheme(normalise_url(url)) in _S3


def parts_at_once(url: str) -> int:
    """Return how many parts of an upload to send in parallel to the store at `url`, before any measurement."""
    scheme = _scheme(normalise_url(url))
    if scheme in _LOCAL:
        return _PARTS_LOCAL
    return _PARTS_S3 if scheme in _S3 else _PARTS_OTHER


def part_chunks_for(store_url: str, image_bytes: int, chunk_bytes: int) -> int:
    """Return how many chunks one part of an upload has; no network. Raises `StoreError` for sizes the store rejects."""
    if not is_s3(store_url):
        return 1
    from holdfast.store.s3_upload import part_bytes_for

    return part_bytes_for(image_bytes, chunk_bytes) // chunk_bytes


def normalise_url(url: str) -> str:
    """Return one spelling for each run. Raises `ConfigError`: malformed, or may hold a secret (then not shown)."""
    if not url or "\0" in url or url != url.strip():
        raise ConfigError(
            "the store's URL is empty, or has a space or NUL at an end; give a path or s3://bucket/run"
        )
    scheme = _scheme(url)
    if scheme == "":
        return os.path.abspath(url)  # noqa: PTH100  (".." must go: the text is the run's identity)
    if url[len(scheme) :].startswith("::"):
        raise ConfigError(
            f"the store's URL chains several file systems ({scheme!r} and more); give the URL of the last one alone"
        )
    try:
        parts = urlsplit(url)
        _reject_secrets(
            parts.password is not None or (scheme in _S3 and "@" in parts.netloc),
            parts.query or parts.fragment,
            scheme,
        )
    except ValueError as error:
        raise ConfigError(f"the store's URL (scheme {scheme!r}) is malformed: {error}") from error
    if scheme in _LOCAL:
        if parts.netloc not in ("", "localhost"):
            raise ConfigError(f"{url}: a file URL names a path on this machine: file:///path (three slashes)")
        return os.path.abspath(unquote(parts.path) or "/")  # noqa: PTH100
    inside = [part for part in parts.path.split("/") if part]
    if any(part in (".", "..") for part in inside):
        raise ConfigError(f"{url}: '.' and '..' have no meaning in {scheme} URLs")
    if scheme in _S3:
        if not _BUCKET.fullmatch(parts.netloc):
            raise ConfigError(f"{url}: {parts.netloc!r} is no bucket name; give s3://bucket/run")
        scheme = "s3"
    return "/".join([f"{scheme}://{parts.netloc}", *inside])


def require_parent(store_url: str, *, create: bool) -> None:
    """Check that the parent of a run's directory exists. `create`: skip the check, since parents may be made.

    A missing parent is more often an unmounted file system than a new place: checkpoints would go to the mount point,
    where nobody finds them, until the root disk is full. Raises `StoreError` if neither directory exists.
    """
    if create or not is_local(store_url):
        return
    run = Path(normalise_url(store_url))
    if _is_missing(run) and _is_missing(run.parent):
        there = next(place for place in run.parents if not _is_missing(place))
        raise StoreError(
            f"{run}: there is no directory {run.parent}; the nearest that exists is {there}. Is the file system "
            "mounted there? Mount it, or correct the path; if it is to be a new place, make the directory, or say "
            "--create"
        )


def _scheme(url: str) -> str:
    match = _SCHEME.match(url)
    return match.group(1).lower() if match else ""


def _reject_secrets(has_password: bool, rest: str, scheme: str) -> None:
    if has_password:
        raise ConfigError(
            f"the store's URL (scheme {scheme!r}) holds credentials; URLs end up in logs and manifests: "
            "give them by the environment, a profile or the instance's role"
        )
    if rest:
        raise ConfigError(
            f"the store's URL (scheme {scheme!r}) has a query or fragment ('?...', '#...'), which may hold a secret "
            "and names no run; remove it"
        )


def _is_missing(path: Path) -> bool:
    try:
        os.stat(path)  # noqa: PTH116 - Path.exists takes other errors for an answer
    except FileNotFoundError:
        return True
    except OSError:
        return False  # something is there, or cannot be seen: the store's own check says what
    return False
