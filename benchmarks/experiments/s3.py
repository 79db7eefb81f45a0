"""Durable and restore in an S3 server on this machine (OpenStack Swift), against s3torchconnector and a bare
multipart upload.

The server is written in Python and shares the two cores with everything else: it is the limit here. The tables
also state its CPU time for an upload and a restore, and the time of a bare client that sends or reads each byte once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import psutil

from benchmarks.cluster import turn
from benchmarks.experiments import Options, available, document
from benchmarks.grid import Grid
from benchmarks.raw_multipart import MultipartWriter, RangeReader
from benchmarks.spread import Spread, columns, ratios, spread

__all__ = ["RAW", "RAW_READ", "grids", "measure"]

_ROUNDS = 3
_PARTS_BYTES = (16 << 20, 32 << 20)
_REQUEST_BYTES = 16 << 20
_THREADS = (2, 4)
RAW = "bare multipart upload"
RAW_READ = "bare ranged reads"


@contextlib.contextmanager
def _running() -> Iterator[tuple[dict[str, str], str]]:
    """Yield the environment that reaches the server, and the name of a bucket."""
    from tests.support.s3_place import fresh_bucket, s3_environment
    from tests.support.swift import running_swift

    with running_swift() as swift:
        environment = s3_environment(swift.endpoint, swift.access_key, swift.secret_key)
        before = dict(os.environ)
        os.environ.update(environment)
        try:
            yield environment, fresh_bucket()
        finally:
            os.environ.clear()
            os.environ.update(before)


def _server_cpu_seconds() -> float:
    """Return the CPU seconds so far of the server's processes, which are children of this one."""
    children = [child for child in psutil.Process().children() if "swift-" in " ".join(child.cmdline())]
    assert children, "the server runs as children of this process"
    return sum(times.user + times.system for times in (child.cpu_times() for child in children))


def _bare(ways: Sequence[Callable[[], float]]) -> dict[str, float]:
    """Return the fastest of these ways, and the server's CPU seconds for it."""
    tried = []
    for way in ways:
        before = _server_cpu_seconds()
        tried.append((way(), _server_cpu_seconds() - before))
    seconds, cpu_seconds = min(tried)
    return {"seconds": seconds, "done_seconds": seconds, "server_cpu_seconds": cpu_seconds}


def measure(options: Options) -> dict[str, Any]:
    rounds: list[dict[str, dict[str, float]]] = []
    restores: list[dict[str, dict[str, float]]] = []
    peers = available(("s3torchconnector",))
    with _running() as (environment, bucket):
        # A toy's ring would be smaller than the smallest part of S3.
        sizes = {"chunk_bytes": 1 << 20, "ring_bytes": 64 << 20} if options.quick else {}
        shape = options.shape("gpt2", store=f"s3://{bucket}/run", environment=environment, **sizes)
        with options.running(shape, fresh=True) as cluster:
            for peer in ("holdfast", *peers):
                cluster.prepare(peer)
            image_bytes = cluster.manifests[-1].image_bytes
            writers = [MultipartWriter(bucket, image_bytes, part_bytes) for part_bytes in _PARTS_BYTES]
            uploads = [partial(writer.write, threads) for writer in writers for threads in _THREADS]
            for number in range(options.rounds_of(_ROUNDS)):
                figures = {}
                for peer in turn(("holdfast", *peers, RAW), number):
                    options.progress(f"round {number + 1}: {peer}")
                    figures[peer] = _bare(uploads) if peer == RAW else cluster.save(peer)
                rounds.append(figures)
            for writer in writers:
                writer.close()
            for peer in peers:
                cluster.save(peer, clean=False)
            file = cluster.manifests[-1].file
        with options.running(shape, fresh=True) as cluster:
            cluster.ask(do="prepare", peer="holdfast")
            reader = RangeReader(bucket, f"run/{file}", _REQUEST_BYTES)
            reads = [partial(reader.read, threads) for threads in _THREADS]
            for number in range(options.rounds_of(_ROUNDS)):
                figures = {}
                for how in turn(("holdfast", *peers, RAW_READ), number):
                    options.progress(f"restore, round {number + 1}: {how}")
                    if how == RAW_READ:
                        figures[how] = _bare(reads)
                        continue
                    before = _server_cpu_seconds()
                    figures[how] = cluster.restore(how, f"{shape.store}-peer/state.pt")
                    figures[how]["server_cpu_seconds"] = _server_cpu_seconds() - before
                restores.append(figures)
            reader.close()
        options.clusters.close()  # before its server
    return document("s3", options, shape, image_bytes=image_bytes, rounds=rounds, restores=restores)


def grids(document: dict[str, Any]) -> list[Grid]:
    rounds, restores, nbytes = document["rounds"], document["restores"], document["image_bytes"]
    rows = []
    ours = columns(rounds, "holdfast", "done_seconds")
    for peer in rounds[0]:
        done = columns(rounds, peer, "done_seconds")
        stall = columns(rounds, peer, "stall_seconds")
        rows.append(
            (
                peer,
                spread(stall).text(3) if stall else "",
                spread(done).text(2),
                f"{nbytes / 1e6 / spread(done).median:.0f}",
                _server(rounds, peer),
                "" if peer == "holdfast" else ratios(done, ours).text(2),
            )
        )
    title = f"{nbytes / 1e9:.2f} GB into the S3 server, seconds"
    names = ("peer", "stall (CST)", "durable (PGT-2)", "MB/s", "server's CPU", "times as long as holdfast")
    result = [Grid(title, names, tuple(rows))]
    ours = columns(restores, "holdfast", "seconds")
    lines = []
    for how in restores[0]:
        seconds = columns(restores, how, "seconds")
        value: Spread | None = None if how == "holdfast" else ratios(seconds, ours)
        lines.append((how, spread(seconds).text(2), _server(restores, how), value.text(2) if value else ""))
    result.append(
        Grid(
            "Restore from it on two ranks, seconds",
            ("way", "seconds", "server's CPU", "times as long as holdfast"),
            tuple(lines),
        )
    )
    return result


def _server(rounds: list[dict[str, Any]], name: str) -> str:
    """Return the server's CPU seconds, "" for ways that also read the upload back."""
    found = columns(rounds, name, "server_cpu_seconds")
    return spread(found).text(2) if found else ""
