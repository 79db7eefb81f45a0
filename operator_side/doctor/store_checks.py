"""Checks by trial that the store does what a flusher needs: small files, a large file in parts, an aborted upload.

    check ─► begin, one part, abort ─► begin, all parts, publish ─► read back, compare ─► delete
    directory: O_DIRECT, sync, free room        bucket: its clock

The checks write only into the run's own `.holdfast/`, and remove their files. They do not disturb a running job.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from holdfast.checkpoints.manifest_order import describe_old_slices
from holdfast.command.checks import CheckPlan, CheckState, Finding
from holdfast.crc import combine, crc32
from holdfast.errors import DamageError, HoldfastError
from holdfast.store import open_store
from holdfast.store.base import Store, Upload
from holdfast.store.s3_bucket import S3Bucket

_PARTS = 3
_CHUNK_BYTES = 8 << 20  # above S3's minimum for a part
_SKEW_SECONDS_MAX = 60.0  # S3 refuses requests at 900
_PAGE_BYTES = 4096
_SYNC_SECONDS_MAX = 1.0
_MIB = 1 << 20


def examine_store(plan: CheckPlan) -> Iterator[Finding]:
    """Check permissions, data integrity, speed and clock of the plan's store."""
    if plan.store is None:
        yield Finding("store", CheckState.SKIPPED, "no store was given", "give --store URL to check it, too")
        return
    store = open_store(plan.store)
    root = Path(store.url) if store.url.startswith("/") else None
    was_there = root is None or root.exists()
    try:
        store.check(write=True)
        yield Finding("store", CheckState.OK, f"{store.url}: listing, writing, reading and deleting work")
        if old := describe_old_slices(store.url, store.list()):
            yield Finding("store slices", CheckState.WARN, old, "no job needs them")
        yield from _big_file(store)
        yield _exclusive(store)
        if root is not None:
            yield from _directory(root, plan)
        else:
            yield from _bucket_clock(store)
    except HoldfastError as error:
        yield Finding("store", CheckState.FAIL, str(error), "fix what the message names, then run this again")
    finally:
        if root is not None and not was_there:
            _remove_empty(root)
        store.close()


def _big_file(store: Store) -> Iterator[Finding]:
    name = f".holdfast/doctor-{secrets.token_hex(8)}"
    chunk = secrets.token_bytes(_PAGE_BYTES) * (_CHUNK_BYTES // _PAGE_BYTES)
    crc = crc32(chunk)
    aborted = _begin(store, name)
    try:
        aborted.write_part(0, *_part(aborted, chunk, crc))
    finally:
        aborted.abort()
    yield Finding("store abort", CheckState.OK, "an upload can be aborted, and leaves nothing")
    upload = _begin(store, name)
    try:
        began = time.perf_counter()
        for index in range(_PARTS * _CHUNK_BYTES // upload.part_bytes):
            upload.write_part(index, *_part(upload, chunk, crc))
        upload.publish()
        seconds = time.perf_counter() - began
    except BaseException:
        upload.abort()
        raise
    try:
        back = memoryview(bytearray(_CHUNK_BYTES))
        began = time.perf_counter()
        for index in range(_PARTS):
            store.read_into(name, index * _CHUNK_BYTES, back)
            if crc32(back) != crc:
                raise DamageError(
                    f"{store.url}: a file of {_PARTS} parts came back with other bytes than were written; do not use it"
                )
        read_seconds = time.perf_counter() - began
    finally:
        store.delete(name)
    nbytes = _PARTS * _CHUNK_BYTES
    yield Finding(
        "store parts",
        CheckState.OK,
        f"{nbytes // _MIB} MiB in parts of {upload.part_bytes // _MIB} MiB, one after the other: written at "
        f"{nbytes / seconds / 1e6:,.0f} MB/s, read back at {nbytes / read_seconds / 1e6:,.0f} MB/s",
    )


def _begin(store: Store, name: str) -> Upload:
    return store.begin(
        name, nbytes=_PARTS * _CHUNK_BYTES, chunk_bytes=_CHUNK_BYTES, write_id=secrets.token_hex(16)
    )


def _part(upload: Upload, chunk: bytes, crc: int) -> tuple[list[memoryview], int]:
    count = min(_PARTS, upload.part_bytes // _CHUNK_BYTES)
    total = 0
    for _ in range(count):
        total = combine(total, crc, _CHUNK_BYTES)
    return [memoryview(chunk)] * count, total


def _exclusive(store: Store) -> Finding:
    name = f".holdfast/doctor-{secrets.token_hex(8)}"
    try:
        first = store.create(name, b"first\n")
        second = store.create(name, b"second\n")
    finally:
        store.delete(name)
    kept = first and not second
    return Finding.from_condition(
        "store exclusive",
        kept,
        "an existing file is not created again" if kept else "an existing file was created again",
        "start one job at a time: this store does not keep two jobs of one run apart",
        CheckState.WARN,
    )


def _directory(root: Path, plan: CheckPlan) -> Iterator[Finding]:
    path = root / ".holdfast" / f"doctor-{secrets.token_hex(8)}"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield _direct(path)
        yield _sync(path)
        skew_seconds = abs(path.stat().st_mtime - time.time())
        yield _clock_finding("its directory", skew_seconds)
    finally:
        path.unlink(missing_ok=True)
    free_bytes = shutil.disk_usage(root).free
    yield Finding.from_condition(
        "store room",
        free_bytes >= 4 * plan.ring_bytes,
        f"{free_bytes / _MIB:,.0f} MiB are free in {root}",
        "lower keep_last or use a larger disk: keep_last + 2 checkpoints must fit",
        CheckState.WARN,
    )


def _direct(path: Path) -> Finding:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        return Finding(
            "store direct",
            CheckState.WARN,
            f"O_DIRECT does not work ({error.strerror})",
            "use another file system: here checkpoints go through the page cache, which is slower and takes memory",
        )
    return Finding("store direct", CheckState.OK, "O_DIRECT works")


def _sync(path: Path) -> Finding:
    began = time.perf_counter()
    with path.open("wb") as file:
        file.write(bytes(_PAGE_BYTES))
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    return Finding.from_condition(
        "store sync",
        seconds <= _SYNC_SECONDS_MAX,
        f"a synced write takes {seconds * 1000:.1f} ms",
        "find out what else uses this disk: each checkpoint waits for several synced writes",
        CheckState.WARN,
    )


def _bucket_clock(store: Store) -> Iterator[Finding]:
    # S3 refuses requests with a wrong time, and sends its own time in every answer.
    inner: Any = getattr(store, "inner", store)
    bucket = getattr(inner, "bucket", None)
    if not isinstance(bucket, S3Bucket):
        return
    answer = bucket.client.list_objects_v2(Bucket=bucket.name, MaxKeys=1)
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    if date:
        yield _clock_finding("the server", abs(parsedate_to_datetime(date).timestamp() - time.time()))


def _clock_finding(whose: str, skew_seconds: float) -> Finding:
    return Finding.from_condition(
        "store clock",
        skew_seconds <= _SKEW_SECONDS_MAX,
        f"{whose} is {skew_seconds:.1f} s away from this machine's clock",
        "set this machine's clock (chrony, ntpd): S3 refuses requests with a time that is wrong by 15 minutes",
    )


def _remove_empty(root: Path) -> None:
    for directory in (root / ".holdfast" / "tmp", root / ".holdfast", root):
        with contextlib.suppress(OSError):  # not empty: a run has begun to use it
            directory.rmdir()
