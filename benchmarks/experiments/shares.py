"""One image received by 1, 2 and 4 stagers, each behind a link of its own; and by a stager that the job starts itself.

    ranks, 400 Mb/s each ──┬── 80 Mb/s ── stager 1/S ─┐
                           └── 80 Mb/s ── stager S/S ─┴─► one file in a directory

The stagers' links are the limit, even on two cores. The job's own stager is on rank 0's node, with a link as wide as a
stager's; rank 0's bytes need no link. All four jobs run at once and take turns within a round; a waiting job uses no
CPU. The requests of a commit are counted (`benchmarks.store_requests`), not timed. Links are network namespaces
(`benchmarks.shaped_job`), which need root.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import store_requests
from benchmarks.cluster import Cluster, running, turn
from benchmarks.experiments import Options, document
from benchmarks.grid import Grid
from benchmarks.shaped_job import Links, why_not
from benchmarks.spread import Spread, columns, ratios, spread
from holdfast.image.manifest import manifest_name

__all__ = ["ONE", "OWN", "added", "against_one", "beyond_bytes", "grids", "measure"]

ONE, OWN = "1", "the job's own, on rank 0's node"
_WAYS = {ONE: 1, "2": 2, "4": 4, OWN: 0}  # stagers beside the ranks
_ROUNDS = 5
_RANKS = 4
_RANK_BITS, _STAGER_BITS = 400_000_000, 80_000_000
_MEBIBYTES = 96  # 10 s through one link
_CHUNK_BYTES = 1 << 18
_STAGED, _DURABLE, _CPU = "staged_seconds", "done_seconds", "cpu_seconds"
_REQUESTS, _ROUND_TRIPS = "commit_requests", "commit_round_trips"


def measure(options: Options) -> dict[str, Any]:
    """Measure. Raises `RuntimeError` if this machine cannot shape links."""
    if reason := why_not():
        raise RuntimeError(f"shares: {reason}")
    options.clusters.close()  # ends the previous experiment's job
    rounds: list[dict[str, dict[str, float]]] = []
    kinds: dict[str, Mapping[str, int]] = {}
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-bench-")))
        clusters: dict[str, Cluster] = {}
        for number, (way, stagers) in enumerate(_WAYS.items()):
            shape = options.shape(
                f"flat-48-{_MEBIBYTES}",
                ranks=_RANKS,
                chunk_bytes=_CHUNK_BYTES,
                links=Links(_RANK_BITS, _STAGER_BITS, stagers),
                environment=store_requests.noting(place / str(number)),
            )
            clusters[way] = stack.enter_context(running(shape, options.progress))
            clusters[way].prepare("holdfast", saves=1)
        for number in range(options.rounds_of(_ROUNDS)):
            figures = {}
            for way in turn(list(clusters), number):
                options.progress(f"round {number + 1}: stagers: {way}")
                figures[way] = clusters[way].save("holdfast")
                noted = store_requests.read(place / str(list(_WAYS).index(way)))
                name = manifest_name(clusters[way].manifests[-1].file)
                requests = store_requests.commit(noted, name)
                figures[way][_REQUESTS] = len(requests)
                figures[way][_ROUND_TRIPS] = store_requests.round_trips(requests)
                kinds[way] = store_requests.counted(requests)
            rounds.append(figures)
        image_bytes = clusters[ONE].manifests[-1].image_bytes
    return document(
        "shares",
        options,
        shape,
        rank_bits=_RANK_BITS,
        stager_bits=_STAGER_BITS,
        stagers=_WAYS,
        image_bytes=image_bytes,
        rounds=rounds,
        commit_requests_of_last=kinds,
    )


def against_one(document: Mapping[str, Any], way: str, figure: str) -> Spread:
    """Return the ratio to one stager's figure, within each round. `way`: a key of the rounds."""
    rounds = document["rounds"]
    return ratios(columns(rounds, way, figure), columns(rounds, ONE, figure))


def added(document: Mapping[str, Any], way: str) -> tuple[int, int]:
    """Return the most extra round trips and requests of a commit over one stager's in the same round."""
    rounds = document["rounds"]
    figures = (_ROUND_TRIPS if _ROUND_TRIPS in rounds[0][ONE] else _REQUESTS, _REQUESTS)
    trips, requests = (max(int(of[way][what] - of[ONE][what]) for of in rounds) for what in figures)
    return trips, requests


def beyond_bytes(document: Mapping[str, Any]) -> float:
    """Return the largest median, over 1, 2 and 4 stagers, of the seconds until durable minus those on the links."""
    return max(
        spread(columns(document["rounds"], way, _DURABLE)).median - _allowed(document, way)
        for way, stagers in document["stagers"].items()
        if stagers
    )


def _allowed(document: Mapping[str, Any], way: str) -> float:
    """Return the seconds that the bytes need on the links to the stagers."""
    ranks = document["shape"]["ranks"]
    stagers = document["stagers"][way]
    links = stagers or ranks / (ranks - 1)
    return float(document["image_bytes"] * 8 / document["stager_bits"] / links)


def grids(document: dict[str, Any]) -> list[Grid]:
    rounds, nbytes = document["rounds"], document["image_bytes"]
    rows = []
    counted = {_REQUESTS: "requests, all sealed to manifest", _ROUND_TRIPS: "round trips of these"}
    counted = {what: title for what, title in counted.items() if what in rounds[0][ONE]}
    for way in document["stagers"]:
        times = []
        for figure in (_STAGED, _DURABLE):
            times.append(spread(columns(rounds, way, figure)).text(2))
            times.append("" if way == ONE else against_one(document, way, figure).text(2))
        cpu = spread([seconds * 1e9 / nbytes for seconds in columns(rounds, way, _CPU)])
        counts = [spread(columns(rounds, way, what)).text(0) for what in counted]
        rows.append((way, *times, f"{_allowed(document, way):.2f}", cpu.text(2), *counts))
    title = (
        f"{nbytes / 1e6:.0f} MB from {document['shape']['ranks']} ranks, each stager's link "
        f"{document['stager_bits'] / 1e6:.0f} Mb/s, seconds: median (least–greatest) of {len(rounds)} rounds"
    )
    names = (
        *("stagers", "staged (PGT-1)", "part of one's", "durable (PGT-2)", "part of one's"),
        *("the bytes alone", "CPU s/GB", *counted.values()),
    )
    return [Grid(title, names, tuple(rows))]
