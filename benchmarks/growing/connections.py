"""Measures the used share of a store's bandwidth: by parts that the flusher's writers send, and by a file read back.

    the product's workers, limits, S3 store, verify_file ─► sink.py: a process that keeps only sizes

The sink limits each connection, or all together. Each way runs for some seconds; the first half, in which holdfast
finds the number of connections, does not count.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from flusher.workers import Workers
from holdfast.checkpoints.verification import verify_file
from holdfast.crc import combine_all, crc32
from holdfast.image.manifest import EntryRecord, Manifest
from holdfast.ring.pages import aligned_buffer
from holdfast.store import open_store
from holdfast.store.base import Store, Upload
from holdfast.store.concurrency import REQUESTS_MAX, ConcurrencyLimit, write_limit

__all__ = ["SINKS", "connections"]

_CHUNK_BYTES = 8 << 20
_BEFORE = 8


class SinkSpeed(NamedTuple):
    """A sink's limits in bytes a second, on each connection and in all; 0: no limit."""

    each: float
    in_all: float

    @property
    def most(self) -> float:
        """Bytes a second with the largest number of connections."""
        each = self.each * REQUESTS_MAX if self.each else float("inf")
        return min(each, self.in_all or float("inf"))


SINKS = {
    "5 MB/s each": SinkSpeed(5e6, 0),
    "50 MB/s each, 100 MB/s in all": SinkSpeed(50e6, 100e6),
}


def connections(speed: SinkSpeed, seconds: float) -> dict[str, dict[str, float]]:
    """Return bytes a second, connections and CPU seconds per GB of each way to one sink.

    Args:
        speed: The sink's limits.
        seconds: Length of each way's run, of which the second half counts.
    """
    found = {}
    with _sink(speed) as port, _environment(port):
        url = f"s3://sink-{port}/run"  # a new name, for which no number of connections is known
        store = open_store(url)
        ways: dict[str, Callable[[Callable[[int], None]], None]] = {
            f"sent, {_BEFORE} connections": lambda count: _send(store, write_limit(url, _BEFORE), count),
            f"sent, {REQUESTS_MAX} connections": lambda count: _send(
                store, write_limit(url, REQUESTS_MAX), count
            ),
            "sent": lambda count: _send(store, write_limit(url), count),
            "read back": lambda count: _read_back(store, count),
        }
        for name, way in ways.items():
            found[name] = _measure(way, port, seconds) | {"most_bytes_per_second": speed.most}
    return found


class _Enough(Exception):
    """Raised when the time of a way is over."""


def _measure(way: Callable[[Callable[[int], None]], None], port: int, seconds: float) -> dict[str, float]:
    begun = time.monotonic()
    over, half = threading.Event(), list[float]()

    def count(_: int) -> None:
        if over.is_set():
            raise _Enough

    def watch() -> None:
        time.sleep(seconds / 2)
        _seen(port)
        half.extend((time.monotonic(), _cpu_seconds()))
        time.sleep(max(0.0, begun + seconds - time.monotonic()))
        half.extend((time.monotonic(), _cpu_seconds(), *_seen(port)))
        over.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    with suppress(_Enough):
        way(count)
    watcher.join()
    half_at, half_cpu, end_at, end_cpu, most, nbytes = half
    return {
        "bytes_per_second": nbytes / (end_at - half_at),
        "connections": most,
        "cpu_seconds_per_gb": (end_cpu - half_cpu) / (nbytes / 1e9),
    }


def _send(store: Store, limit: ConcurrencyLimit, count: Callable[[int], None]) -> None:
    """Upload one file after the other, as the flusher's writers do, without completing any."""
    nbytes = 2 * REQUESTS_MAX * _CHUNK_BYTES
    memory = aligned_buffer(_CHUNK_BYTES)
    sum32 = crc32(memory)
    workers = Workers("writer", limit.maximum, limit)
    room, ended = threading.Semaphore(2 * REQUESTS_MAX), list[BaseException]()

    def send(upload: Upload, part: int) -> int:
        try:
            if not ended:
                upload.write_part(part, [memory] * (upload.part_bytes // _CHUNK_BYTES), sum32)
                count(upload.part_bytes)
        except BaseException as error:  # noqa: BLE001 - raised below
            ended.append(error)
        finally:
            room.release()
        return upload.part_bytes

    try:
        while not ended:
            upload = store.begin("image.pt", nbytes=nbytes, chunk_bytes=_CHUNK_BYTES, write_id="w")
            for part in range(nbytes // upload.part_bytes):
                room.acquire()
                workers.submit((0,), partial(send, upload, part))
        raise ended[0]
    finally:
        workers.stop()


def _read_back(store: Store, count: Callable[[int], None]) -> None:
    """Read one large file of zeros repeatedly."""
    chunks = 4 * REQUESTS_MAX
    nbytes = chunks * _CHUNK_BYTES
    _make(store, "zeros.pt", nbytes)
    sum32 = crc32(bytes(_CHUNK_BYTES))
    manifest = Manifest(
        run="run",
        attempt=1,
        step=1,
        file="zeros.pt",
        image_bytes=nbytes,
        image_crc32=combine_all((sum32, _CHUNK_BYTES) for _ in range(chunks)),
        chunk_bytes=_CHUNK_BYTES,
        chunk_crc32s=(sum32,) * chunks,
        ranks=1,
        layout_digest="0",
        write_id="w",
        created="",
        pgt1_seconds=0,
        pgt2_seconds=0,
        entries=(EntryRecord(name="zeros", offset=0, nbytes=nbytes, crc32=0),),
        tensors=(),
    )
    while True:
        verify_file(store, manifest, progress=count)


def _make(store: Store, name: str, nbytes: int) -> None:
    """Make an object of this size, by the sink's own request."""
    store.write(f"make/{nbytes}/{name}", b"")


@contextmanager
def _sink(speed: SinkSpeed) -> Iterator[int]:
    command = [sys.executable, "-m", "benchmarks.growing.sink", str(speed.each), str(speed.in_all)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


@contextmanager
def _environment(port: int) -> Iterator[None]:
    own: Mapping[str, str] = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(Path(os.devnull)),
    }
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _seen(port: int) -> tuple[float, float]:
    """Return the most concurrent requests and the bytes transferred since the last call."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/peak", timeout=60) as answer:
        most, nbytes = answer.read().split()
        return float(most), float(nbytes)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
