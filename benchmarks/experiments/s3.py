"""Durable and restore in an S3 server on this machine (OpenStack Swift), against s3torchconnector and a bare
multipart upload.

The server shares the two cores with everything else and is written in Python: it is the limit here, and stated beside.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from benchmarks.cluster import turn
from benchmarks.experiments import Options, available, document
from benchmarks.grid import Grid
from benchmarks.raw_multipart import MultipartWriter
from benchmarks.spread import Spread, columns, ratios, spread
from holdfast.catalog import Catalog
from holdfast.storage import open_store

__all__ = ["grids", "measure"]

_ROUNDS = 3
_PART_BYTES = 16 << 20
_THREADS = (2, 4)
_RAW = "bare multipart upload"


@contextlib.contextmanager
def _server() -> Iterator[tuple[dict[str, str], str]]:
    """The environment that reaches it, and a bucket."""
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


def measure(options: Options) -> dict[str, Any]:
    rounds: list[dict[str, dict[str, float]]] = []
    restores: list[dict[str, dict[str, float]]] = []
    peers = available(("s3torchconnector",))
    with _server() as (environment, bucket):
        # A toy's ring would be smaller than the smallest part of S3.
        sizes = {"chunk_bytes": 1 << 20, "ring_bytes": 64 << 20} if options.quick else {}
        shape = options.shape("gpt2", store=f"s3://{bucket}/run", environment=environment, **sizes)
        with options.running(shape, fresh=True) as cluster:
            for peer in ("holdfast", *peers):
                cluster.prepare(peer)
            store = open_store(shape.store)
            image_bytes = next(
                item.manifest.image_bytes for item in Catalog(store).list() if item.manifest is not None
            )
            raw = MultipartWriter(bucket, image_bytes, _PART_BYTES)
            for number in range(options.rounds_of(_ROUNDS)):
                figures = {}
                for peer in turn(("holdfast", *peers, _RAW), number):
                    options.progress(f"round {number + 1}: {peer}")
                    figures[peer] = (
                        {"done_seconds": min(raw.write(threads) for threads in _THREADS)}
                        if peer == _RAW
                        else cluster.save(peer)
                    )
                rounds.append(figures)
            raw.close()
            for peer in peers:
                cluster.save(peer, clean=False)
        with options.running(shape, fresh=True) as cluster:
            cluster.ask(do="prepare", peer="holdfast")
            for number in range(options.rounds_of(_ROUNDS)):
                options.progress(f"restore, round {number + 1}")
                ways = turn(("holdfast", *peers), number)
                restores.append({how: cluster.restore(how, f"{shape.store}-peer/state.pt") for how in ways})
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
                "" if peer == "holdfast" else ratios(done, ours).text(2),
            )
        )
    title = f"{nbytes / 1e9:.2f} GB into the S3 server, seconds"
    names = ("peer", "stall (CST)", "durable (PGT-2)", "MB/s", "times as long as holdfast")
    result = [Grid(title, names, tuple(rows))]
    ours = columns(restores, "holdfast", "seconds")
    lines = []
    for how in restores[0]:
        seconds = columns(restores, how, "seconds")
        value: Spread | None = None if how == "holdfast" else ratios(seconds, ours)
        lines.append((how, spread(seconds).text(2), value.text(2) if value else ""))
    result.append(
        Grid(
            "Restore from it on two ranks, seconds",
            ("way", "seconds", "times as long as holdfast"),
            tuple(lines),
        )
    )
    return result
