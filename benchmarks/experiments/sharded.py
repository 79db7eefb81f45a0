"""A state split among the ranks: time until plain torch opens one file of whole tensors; and restore onto other meshes.

    saves      FSDP2 on 2 and on 4 ranks, every peer once a round; HSDP on 2 x 2: bytes and memory of holdfast
    restores   a checkpoint of FSDP2 on 4 ranks ─► FSDP2 on 2, HSDP on 2 x 2; cold page cache; beside DCP's own load

A peer counts only after each rank has compared its part of the checkpoint with the state.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import memory
from benchmarks.cluster import Cluster, Shape, turn
from benchmarks.cold import forget
from benchmarks.experiments import Options, document
from benchmarks.grid import Grid
from benchmarks.peers import SHARDED
from benchmarks.restoring import DCP, OURS
from benchmarks.spread import Spread, columns, ratios, spread
from holdfast.image.manifest import manifest_name

__all__ = ["against_best", "against_dcp", "grids", "holders", "measure"]

_ROUNDS = 5
_RANKS = (2, 4)
_MODEL, _TOY = "fsdp2-1500", "fsdp2-24"
_PEERS = ("holdfast", *SHARDED)
_STALL, _DONE, _ON_A_CORE = "stall_seconds", "done_seconds", "stall_cpu_seconds"
_MIB = 1 << 20


def measure(options: Options) -> dict[str, Any]:
    model = options.model or (_TOY if options.quick else _MODEL)
    if not model.startswith("fsdp2-"):
        raise RuntimeError(f"{model!r} is not split: give --model fsdp2-N, a state of N MB")
    split = options.shape(model)
    split = dataclasses.replace(split, model=model, ring_bytes=_ring_bytes(model))
    replicated = dataclasses.replace(split, model=model.replace("fsdp2", "hsdp"), ranks=_RANKS[-1])
    cells, restores = [], []
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=options.folder) as kept:
        folder = Path(kept)
        store = str(folder / "run")
        for ranks in _RANKS:
            last = ranks == _RANKS[-1]
            shape = dataclasses.replace(split, ranks=ranks, store=store if last else "")
            with options.running(shape, fresh=True) as cluster:
                cells.append(_saves(options, cluster, _PEERS))
                if last:
                    files = _keep(cluster, folder / "dcp")
        with options.running(replicated, fresh=True) as cluster:
            cells.append(_saves(options, cluster, _PEERS[:1]))
        for shape in (split, replicated):
            with options.running(dataclasses.replace(shape, store=store), fresh=True) as cluster:
                restores.append(_restores(options, cluster, files, folder / "dcp"))
        options.clusters.close()  # before its store is removed
    shape = dataclasses.replace(split, ranks=_RANKS[-1])
    return document("sharded", options, shape, cells=cells, restores=restores)


def _ring_bytes(model: str) -> int:
    """Return half of the state, at most 1 GiB: too small for the whole state."""
    return min(1 << 30, int(model.split("-")[1]) * 1_000_000 // 2)


def _saves(options: Options, cluster: Cluster, peers: Sequence[str]) -> dict[str, Any]:
    cluster.ask(do="update", seconds=0.0)  # an update that waits for the copy, and changes nothing
    ranks = {peer: cluster.prepare(peer) for peer in peers}
    rounds = []
    for number in range(options.rounds_of(_ROUNDS) if len(peers) > 1 else 1):
        figures = {}
        for peer in turn(peers, number):
            options.progress(f"{_mesh(cluster.shape)}, round {number + 1}: {peer}")
            figures[peer] = cluster.save(peer)
        rounds.append(figures)
    manifest, pids = cluster.manifests[-1], cluster.pids()
    sent = [of["sent_bytes"] for of in manifest.record["ranks"].values() if "sent_bytes" in of]
    return {
        "mesh": _mesh(cluster.shape),
        "ranks": cluster.shape.ranks,
        "image_bytes": manifest.image_bytes,
        "ring_bytes": cluster.shape.ring_bytes,
        "rounds": rounds,
        "memory": {
            "ranks": ranks,
            "peak_bytes": {name: memory.peak_bytes(pids[name]) for name in ("stager", "flusher")},
        },
        "sent_bytes": sum(sent),
    }


def _keep(cluster: Cluster, folder: Path) -> tuple[Path, ...]:
    """Save the checkpoints to restore, by holdfast and by DCP, whose shards are moved to `folder`."""
    cluster.save("holdfast")
    cluster.save("dcp+to-torch", clean=False)
    (shards,) = (path.parent for path in (cluster.folders.scratch / "peers").rglob(".metadata"))
    shards.rename(folder)
    path = cluster.path(cluster.manifests[-1].step)
    return path, path.with_name(manifest_name(path.name))


def _restores(options: Options, cluster: Cluster, files: tuple[Path, ...], shards: Path) -> dict[str, Any]:
    cluster.ask(do="prepare", peer="holdfast")  # joins and restores
    for how in (OURS, DCP):  # warm up: DCP's first load imports; both loads are compared with the file
        cluster.restore(how, str(shards), compare=how == DCP)
        cluster.ask(do="compare", source=str(files[0]))
    rounds: list[dict[str, Any]] = []
    for number in range(options.rounds_of(_ROUNDS)):
        figures: dict[str, Any] = {}
        for how in turn((OURS, DCP), number):
            options.progress(f"to {_mesh(cluster.shape)}, round {number + 1}: {how}")
            forget(*files, *shards.iterdir())
            figures[how] = cluster.restore(how, str(shards), compare=False)
        cluster.ask(do="compare", source=str(files[0]))
        rounds.append(figures)
    return {"mesh": _mesh(cluster.shape), "image_bytes": files[0].stat().st_size, "rounds": rounds}


def _mesh(shape: Shape) -> str:
    replicas = 2
    return (
        f"FSDP2 on {shape.ranks}"
        if shape.model.startswith("fsdp2")
        else f"HSDP on {replicas} x {shape.ranks // replicas}"
    )


# -- what is said of it ------------------------------------------------------------------------------------------------


def against_best(cell: Mapping[str, Any]) -> Spread:
    """Return holdfast's time until the file opens, as a ratio to the best peer's."""
    return max((_part(cell, peer, _DONE) for peer in SHARDED), key=lambda value: value.median)


def against_dcp(cell: Mapping[str, Any]) -> Spread:
    """Return holdfast's stall as a ratio to that of the better of DCP's two asynchronous saves."""
    parts = [_part(cell, peer, _STALL) for peer in SHARDED if peer.startswith("dcp")]
    return max(parts, key=lambda value: value.median)


def holders(cell: Mapping[str, Any]) -> dict[str, int]:
    """Return the peak bytes of each process of holdfast; for a rank, without its own shards."""
    rank = cell["memory"]["ranks"]["holdfast"]["extra_peak_bytes"]
    return {"rank": rank, **cell["memory"]["peak_bytes"]}


def _part(cell: Mapping[str, Any], peer: str, figure: str) -> Spread:
    ours, theirs = (columns(cell["rounds"], name, figure) for name in ("holdfast", peer))
    return ratios(ours, theirs)


def grids(document: dict[str, Any]) -> list[Grid]:
    cells, restores = document["cells"], document["restores"]
    compared = [cell for cell in cells if len(cell["rounds"][0]) > 1]
    on_a_core = _on_a_core(compared)
    shown = [on_a_core] if on_a_core.rows else []  # older documents have no such count
    return [*map(_times, compared), *shown, _memory(cells), _sent(cells), *map(_restored, restores)]


def _times(cell: Mapping[str, Any]) -> Grid:
    rows = []
    for peer in cell["rounds"][0]:
        values = {name: columns(cell["rounds"], peer, name) for name in (_DONE, _STALL, "written_seconds")}
        parts = (
            ["", ""] if peer == "holdfast" else [_part(cell, peer, name).text() for name in (_DONE, _STALL)]
        )
        shards = spread(values["written_seconds"]).text(2) if values["written_seconds"] else ""
        rows.append(
            (peer, shards, spread(values[_DONE]).text(2), parts[0], spread(values[_STALL]).text(3), parts[1])
        )
    title = (
        f"{cell['mesh']}, {cell['image_bytes'] / 1e9:.2f} GB, seconds: median (least–greatest) of "
        f"{len(cell['rounds'])} rounds; holdfast's part of a peer's"
    )
    names = ("peer", "shards written", "one file opens", "holdfast / peer", "stall", "holdfast / peer")
    return Grid(title, names, tuple(rows))


def _on_a_core(cells: Sequence[Mapping[str, Any]]) -> Grid:
    rows = tuple(
        (cell["mesh"], peer, spread(seconds).text(3))
        for cell in cells
        for peer in cell["rounds"][0]
        if (seconds := columns(cell["rounds"], peer, _ON_A_CORE))
    )
    title = "Of the stall, seconds that the training thread was on a core; else it slept, or waited for one"
    return Grid(title, ("mesh", "peer", "on a core"), rows)


def _memory(cells: Sequence[Mapping[str, Any]]) -> Grid:
    rows = []
    for cell in cells:
        image = cell["image_bytes"]
        kept = {f"rank with {peer}": of["extra_peak_bytes"] for peer, of in cell["memory"]["ranks"].items()}
        for name, nbytes in {**kept, **cell["memory"]["peak_bytes"]}.items():
            rows.append((cell["mesh"], name, f"{nbytes / 1e6:.0f}", f"{nbytes / image:.2f}"))
    names = ("mesh", "process", "MB", "of the image")
    return Grid(
        "Memory at most: of a rank beyond its own shards, of the others with the ring", names, tuple(rows)
    )


def _sent(cells: Sequence[Mapping[str, Any]]) -> Grid:
    rows = tuple(
        (cell["mesh"], f"{cell['image_bytes']}", f"{cell['sent_bytes'] / cell['image_bytes']:.4f}")
        for cell in cells
    )
    return Grid("Sent by all ranks together", ("mesh", "bytes of the image", "sent / image"), rows)


def _restored(of: Mapping[str, Any]) -> Grid:
    rounds, rows = of["rounds"], []
    ours = columns(rounds, OURS, "seconds")
    for how in (OURS, DCP):
        seconds, grown = columns(rounds, how, "seconds"), columns(rounds, how, "grown_bytes")
        part = "" if how == OURS else ratios(ours, seconds).text()
        read = columns(rounds, how, "bytes_read")
        share = f"{max(read) / of['image_bytes']:.2f}" if read else ""
        rows.append((how, spread(seconds).text(2), part, f"{max(grown) / _MIB:.0f}", share))
    title = f"What FSDP2 on {_RANKS[-1]} saved, onto {of['mesh']}; page cache cold, {len(rounds)} rounds"
    names = ("way", "seconds", "holdfast / peer", "MiB beyond own shards", "read by a rank / image")
    return Grid(title, names, tuple(rows))
