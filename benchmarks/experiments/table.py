"""Every peer once a round, one checkpoint at a time: stall, staged, durable, beside the machine's own limits."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from benchmarks import jobs, memory
from benchmarks.cluster import Cluster, turn
from benchmarks.experiments import Options, available, document
from benchmarks.grid import Grid
from benchmarks.hub import Hub
from benchmarks.peers import NEVER_DURABLE, PEERS, TOGETHER
from benchmarks.raw_direct import DirectWriter
from benchmarks.spread import Spread, columns, ratios, spread
from holdfast.image.manifest import Manifest

__all__ = ["RawTransfer", "grids", "measure", "medians", "phases_of", "ratio"]

_ROUNDS = 5
_IDLE_SECONDS = 10.0
_TRANSFERS = 3
_RAW = ("raw_mpi", "raw_direct", "raw_over", "raw_both", "raw_pipeline")
_DISK = ("raw_direct", "raw_over")
_PHASES = (
    "save_seconds",
    "copy_seconds",
    "crc_seconds",
    "sending_seconds",
    "offers_seconds",
    "receive_seconds",
    "open_seconds",
    "verify_seconds",
    "write_seconds",
    "publish_seconds",
)


class RawTransfer:
    """Sends the image's bytes over MPI in a separate job, from as many ranks to one receiver."""

    def __init__(self, cluster: Cluster, hub: Hub) -> None:
        self._cluster, self._hub = cluster, hub
        shape = cluster.shape
        image_bytes = cluster.manifests[-1].image_bytes
        word = ["-m", "benchmarks.raw_mpi", "sender", "--hub", str(hub.path), "--nbytes", str(image_bytes)]
        word += ["--chunk-bytes", str(shape.chunk_bytes)]
        word += ["--ring-chunks", str(cluster.ring_bytes // shape.chunk_bytes)]
        receiver = [sys.executable, *("receiver" if part == "sender" else part for part in word)]
        self._job = jobs.Job(
            "raw_mpi",
            shape.ranks,
            word,
            receiver,
            environment=jobs.rank_environment(
                shape.ranks, cluster.folders, chunk_bytes=shape.chunk_bytes, ring_bytes=shape.ring_bytes
            ),
            folder=cluster.folders.scratch,
        )

    def seconds(self, of: int = 1) -> float:
        """Return the best of several transfers: the first after a pause may take several times as long."""
        return min(self._ask({"do": "transfer"})["end"] for _ in range(of))

    def pipeline(self) -> dict[str, float]:
        """Time a pipeline that copies from tensors, transfers, writes and syncs at the same time."""
        path = self._cluster.folders.scratch / "pipeline.bin"
        taken = self._ask({"do": "pipeline", "file": str(path)})
        return {"staged_seconds": taken["staged"], "done_seconds": taken["end"]}

    def _ask(self, order: dict[str, str]) -> dict[str, float]:
        """Run one order; return the seconds from the first rank's start to the last rank's marks."""
        answers = self._hub.ask("raw_mpi", order)
        begin = min(answer["start"] for answer in answers)
        return {name: max(answer[name] for answer in answers) - begin for name in ("staged", "end")}

    @contextlib.contextmanager
    def running(self) -> Iterator[RawTransfer]:
        """Yield the job after a warm-up, and end it with the context."""
        with self._job:
            self._hub.gather("raw_mpi", self._cluster.shape.ranks + 1, ended=lambda: self._job.ended)
            self.seconds()
            self.pipeline()
            yield self
            self._hub.dismiss("raw_mpi")
            self._job.end()


def measure(options: Options) -> dict[str, Any]:
    shape = options.shape("gpt2")
    rounds: list[dict[str, dict[str, float]]] = []
    ranks: dict[str, Any] = {}
    count = options.rounds_of(_ROUNDS)
    with options.running(shape) as cluster:
        ranks["holdfast"] = cluster.prepare("holdfast")
        image_bytes = cluster.manifests[-1].image_bytes
        footprints = {
            name: asdict(memory.footprint(pid)) for name, pid in cluster.pids().items() if name != "trainer"
        }
        options.progress("idle CPU")
        idle = memory.idle_cpu_percent(cluster.pids(), options.count(int(_IDLE_SECONDS), 1))
        direct = DirectWriter(cluster.folders.scratch, image_bytes, cluster.shape.chunk_bytes)
        with contextlib.closing(direct):
            direct.write(2, truncate=False)  # creates the file that later calls overwrite
            for number, group in enumerate(TOGETHER):
                peers = available(group)
                for peer in peers:
                    ranks[peer] = cluster.prepare(peer)
                with _raw(cluster) if number == 0 else contextlib.nullcontext() as raw:
                    for turned in range(count):
                        options.progress(f"round {turned + 1} of {count}: {', '.join(peers)}")
                        order = turn(["holdfast", *peers, *(_RAW if raw else _DISK)], turned)
                        figures = {peer: _figures(cluster, peer, raw, direct) for peer in order}
                        rounds.append(figures)
                for peer in peers:
                    cluster.drop(peer)
        phases, ring_bytes = phases_of(cluster.manifests[2:]), cluster.ring_bytes
    return document(
        "table",
        options,
        shape,
        image_bytes=image_bytes,
        rounds=rounds,
        memory={"ranks": ranks, **footprints},
        idle_cpu_percent=idle,
        phases=phases,
        ring_bytes=ring_bytes,
    )


def _raw(cluster: Cluster) -> contextlib.AbstractContextManager[RawTransfer]:
    return RawTransfer(cluster, cluster.hub).running()


def _figures(cluster: Cluster, peer: str, raw: RawTransfer | None, direct: DirectWriter) -> dict[str, float]:
    if peer == "raw_mpi":
        assert raw is not None
        return {"done_seconds": raw.seconds(_TRANSFERS)}
    if peer == "raw_both":
        assert raw is not None
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(lambda: direct.write(2, truncate=False))
            staged = raw.seconds()
            done = writing.result()
        cluster.quiet()
        return {"staged_seconds": staged, "done_seconds": max(staged, done)}
    if peer == "raw_pipeline":
        assert raw is not None
        figures = raw.pipeline()
        cluster.quiet()
        return figures
    if peer in _DISK:
        by_threads = {threads: direct.write(threads, truncate=peer == "raw_direct") for threads in (1, 2)}
        best = min(by_threads, key=lambda threads: by_threads[threads])
        cluster.quiet()
        return {"done_seconds": by_threads[best], "threads": float(best)}
    figures = cluster.save(peer)
    if peer in NEVER_DURABLE:
        figures["staged_seconds"] = figures["done_seconds"]  # of the rank that saves: the others know of none
    return figures


def phases_of(manifests: Sequence[Manifest]) -> dict[str, Any]:
    """Return holdfast's recorded phases by process, in seconds of the slowest rank, over these checkpoints."""
    result: dict[str, Any] = {}
    records = [manifest.record for manifest in manifests]
    for phase in _PHASES:
        values = []
        for record in records:
            places = [*record.get("ranks", {}).values(), record.get("stager", {}), record.get("flusher", {})]
            found = [place[phase] for place in places if phase in place]
            if found:
                values.append(max(found))
        if values:
            result[phase] = spread(values)
    return result


def medians(rounds: list[dict[str, dict[str, float]]], peer: str, name: str) -> Spread | None:
    """Return the spread of one figure of one peer, None if it was not measured."""
    values = columns(rounds, peer, name)
    return spread(values) if values else None


def ratio(
    rounds: list[dict[str, dict[str, float]]], over: tuple[str, str], under: tuple[str, str]
) -> Spread | None:
    """Return the ratio of two (peer, figure) in the rounds that have both, None without such a round."""
    both = [of for of in rounds if over[1] in of.get(over[0], {}) and under[1] in of.get(under[0], {})]
    return ratios(columns(both, *over), columns(both, *under)) if both else None


def grids(document: dict[str, Any]) -> list[Grid]:
    rounds, image_bytes = document["rounds"], document["image_bytes"]
    rows = []
    for peer in (*PEERS, *_RAW):
        done = medians(rounds, peer, "done_seconds")
        if done is None:
            continue
        stall = medians(rounds, peer, "stall_seconds")
        in_memory = peer in {"raw_mpi", *NEVER_DURABLE}
        staged = done if in_memory else medians(rounds, peer, "staged_seconds")
        rows.append(
            (
                peer,
                stall.text(3) if stall else "",
                staged.text(3) if staged else "",
                "" if in_memory else done.text(3),
                f"{image_bytes / 1e9 / done.median:.2f}",
            )
        )
    count = sum(PEERS[1] in figures for figures in rounds)
    title = (
        f"{image_bytes / 1e9:.2f} GB image, seconds: median (least–greatest) of {count} rounds, "
        f"holdfast of {len(rounds)}"
    )
    result = [Grid(title, ("peer", "stall (CST)", "staged (PGT-1)", "durable (PGT-2)", "GB/s"), tuple(rows))]
    return [*result, _ratio_grid(rounds), _memory_grid(document), _phase_grid(document["phases"])]


def _ratio_grid(rounds: list[dict[str, dict[str, float]]]) -> Grid:
    rows: list[tuple[str, ...]] = []
    for what, figure in (
        ("durable", "done_seconds"),
        ("staged", "staged_seconds"),
        ("stall", "stall_seconds"),
    ):
        for peer in PEERS[1:]:
            if peer in NEVER_DURABLE and figure == "done_seconds":
                continue
            value = ratio(rounds, (peer, figure), ("holdfast", figure))
            if value is not None:
                rows.append((f"{what}: {peer} / holdfast", value.text()))
    for name, over, under in (
        ("staged: holdfast / raw MPI", ("holdfast", "staged_seconds"), ("raw_mpi", "done_seconds")),
        (
            "durable: holdfast / raw O_DIRECT, a new file",
            ("holdfast", "done_seconds"),
            ("raw_direct", "done_seconds"),
        ),
        (
            "durable: holdfast / raw O_DIRECT, over an old file",
            ("holdfast", "done_seconds"),
            ("raw_over", "done_seconds"),
        ),
        (
            "staged: holdfast / both raw at once",
            ("holdfast", "staged_seconds"),
            ("raw_both", "staged_seconds"),
        ),
        ("durable: holdfast / both raw at once", ("holdfast", "done_seconds"), ("raw_both", "done_seconds")),
        (
            "staged: holdfast / bare pipeline",
            ("holdfast", "staged_seconds"),
            ("raw_pipeline", "staged_seconds"),
        ),
        ("durable: holdfast / bare pipeline", ("holdfast", "done_seconds"), ("raw_pipeline", "done_seconds")),
    ):
        value = ratio(rounds, over, under)
        if value is not None:
            rows.append((name, value.text()))
    return Grid(
        "Ratios, each made within one round: median (least–greatest)", ("ratio", "times"), tuple(rows)
    )


def _memory_grid(document: dict[str, Any]) -> Grid:
    def megabytes(value: float) -> str:
        return f"{value / 1e6:.0f}"

    idle = document["idle_cpu_percent"]
    rows: list[tuple[str, ...]] = [
        (name, megabytes(of["uss_bytes"]), "", f"{idle[name]:.2f}")
        for name, of in document["memory"].items()
        if name != "ranks"
    ]
    rows.append(
        (
            "ring (both map it)",
            megabytes(document.get("ring_bytes") or document["shape"]["ring_bytes"]),
            "",
            "",
        )
    )
    for peer, of in document["memory"]["ranks"].items():
        cpu = f"{idle['trainer']:.2f}" if peer == "holdfast" else ""
        rows.append(
            (f"rank with {peer}", megabytes(of["extra_bytes"]), megabytes(of["extra_peak_bytes"]), cpu)
        )
    return Grid(
        "Memory beyond the state, MB, and idle CPU",
        ("process", "kept", "at most", "idle, % of a core"),
        tuple(rows),
    )


def _phase_grid(phases: dict[str, Any]) -> Grid:
    rows = tuple((name, Spread(**of).text(3)) for name, of in phases.items())
    return Grid(
        "holdfast's own record: seconds of each phase (the slowest rank's)", ("phase", "seconds"), rows
    )
