"""Target figures of holdfast, each beside the measured one, computed from the documents alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.experiments import launchers, restore, s3, sharded, shares, transport
from benchmarks.experiments.goodput import EFFECTIVE, TENTH
from benchmarks.experiments.makespan import overheads, shortest
from benchmarks.experiments.table import medians, ratio
from benchmarks.grid import Grid
from benchmarks.machine_limits import (
    Document,
    Documents,
    bare_is,
    bare_save,
    bare_share,
    gate_limit,
    pipeline,
    raw_ranges,
    raw_read,
    server_share,
)
from benchmarks.restoring import DCP, OURS, RING
from benchmarks.spread import Spread, columns, ratios

__all__ = ["TARGETS", "Target", "Verdict", "grid"]

_MIB = 1 << 20


@dataclass(frozen=True)
class Verdict:
    """The measured figure, and whether it meets the target."""

    got: str
    met: bool


@dataclass(frozen=True)
class Target:
    """One figure to reach.

    Attributes:
        judge: Returns the verdict from the experiment's document, None if the document lacks the figure.
        limit: Returns the machine's own limit from the documents, empty if it was not measured.
    """

    what: str
    wanted: str
    experiment: str
    judge: Callable[[Document], Verdict | None]
    limit: Callable[[Documents], str] = lambda _: ""


def _at_most(value: Spread | None, limit: float, *, percent: bool = False) -> Verdict | None:
    if value is None:
        return None
    text = f"{value.text(1, times=100)} %" if percent else value.text()
    return Verdict(text, value.median <= limit)


def _at_least(value: Spread | None, limit: float, *, percent: bool = False) -> Verdict | None:
    if value is None:
        return None
    text = f"{value.text(0, times=100)} %" if percent else f"{value.text(1)} times"
    return Verdict(text, value.median >= limit)


def _of(over: tuple[str, str], under: tuple[str, str]) -> Callable[[Document], Spread | None]:
    return lambda document: ratio(document["rounds"], over, under)


def _best_dcp(document: Document, figure: str, *, ours_over: bool) -> Spread | None:
    """Compare with the better variant of `async_save`."""
    values = []
    for peer in ("dcp-thread", "dcp-process"):
        pair = (("holdfast", figure), (peer, figure))
        value = ratio(document["rounds"], *(pair if ours_over else pair[::-1]))
        if value is not None:
            values.append(value)
    if not values:
        return None
    return (max if ours_over else min)(values, key=lambda value: value.median)


def _overhead(every: int, limit: float, model: str = "") -> Callable[[Document], Verdict | None]:
    def judge(document: Document) -> Verdict | None:
        runs = [run for run in document["runs"] if run.get("model", "") == model]
        return _at_most(overheads(runs, "holdfast", every), limit, percent=True)

    return judge


def _more_often(peer: str, limit: float) -> Callable[[Document], Verdict | None]:
    def judge(document: Document) -> Verdict | None:
        ours, theirs = (shortest(document["runs"], name) for name in ("holdfast", peer))
        times = theirs.beyond / ours.within if ours.within else 0.0
        got = f"at least {times:.1f} times (interval {ours.text()} against {theirs.text()} iterations)"
        return Verdict(got, times >= limit)

    return judge


def _gate(document: Document) -> Verdict | None:
    shares = []
    for of in document["cells"]:
        coarse = [max(figures["coarse"]["stall_seconds"], 1e-4) for figures in of["rounds"]]
        layered = [figures["layer-wise"]["stall_seconds"] for figures in of["rounds"]]
        shares.append(ratios(layered, coarse).median)
    met = sum(share <= 1 / 3 for share in shares)
    text = f"{min(shares):.2f} to {max(shares):.2f}; a third or less in {met} of {len(shares)} settings"
    return Verdict(text, met == len(shares))


def _restore(rounds_key: str, other: str, limit: float) -> Callable[[Document], Verdict | None]:
    def judge(document: Document) -> Verdict | None:
        rounds = document[rounds_key]
        theirs, ours = columns(rounds, other, "seconds"), columns(rounds, "holdfast", "seconds")
        return _at_least(ratios(theirs, ours), limit) if theirs else None

    return judge


def _restored_in(document: Document, key: str, way: str, other: str, limit: float) -> Verdict | None:
    """Judge one way's seconds as a ratio to another's."""
    rounds = document.get(key, [])
    times, others = columns(rounds, way, "seconds"), columns(rounds, other, "seconds")
    return _at_most(ratios(times, others), limit) if times and others else None


def _added(figure: str, limit: float) -> Callable[[Document], Verdict | None]:
    """Judge what holdfast adds to a bare script; met if met under each launcher."""

    def judge(document: Document) -> Verdict | None:
        found = launchers.added(document, figure)
        return _worst(found, limit) if found else None

    return judge


def _cpu_seconds(document: Document) -> Verdict | None:
    """Until it is read back, with the training's own beside it."""
    return _at_most(medians(document["rounds"], "holdfast", "cpu_seconds"), 0.8)


def _memory(document: Document) -> Verdict | None:
    kept = document["memory"]["ranks"]["holdfast"]["extra_peak_bytes"]
    slice_bytes = document["image_bytes"] / document["shape"]["ranks"]
    extra = (kept - slice_bytes) / _MIB
    return Verdict(f"slice of {slice_bytes / 1e6:.0f} MB + {extra:.0f} MiB", extra <= 64)


def _flat(document: Document) -> Verdict | None:
    samples = document["samples"]
    half = samples[len(samples) // 2]
    grown = {name: (samples[-1][name] - half[name]) / _MIB for name in ("trainer", "stager", "flusher")}
    count = samples[-1]["saves"] - half["saves"]
    text = ", ".join(f"{name} {value:+.1f} MiB" for name, value in grown.items())
    return Verdict(f"{text} over the last {count}", all(value < 2 for value in grown.values()))


def _written(document: Document) -> Verdict | None:
    """Judge the tier that writes most per byte of state."""
    most = max(figures[name]["amplification"] for figures in document["rounds"] for name in document["how"])
    return Verdict(f"{most:.4f}", most <= 1.01)


def _nvme(document: Document) -> Verdict | None:
    """Judge the bandwidth at the best number of writers."""
    found = []
    for name in document["how"]:
        if name.startswith("nvme"):
            ours, raw = (
                [figures[which]["seconds"] for figures in document["rounds"]]
                for which in (name, f"raw beside {name}")
            )
            found.append(ratios(raw, ours))
    return _at_least(max(found, key=lambda value: value.median), 0.9, percent=True)


def _compared(document: Document) -> dict[str, Document]:
    """Return the meshes on which every peer has saved."""
    return {cell["mesh"]: cell for cell in document["cells"] if len(cell["rounds"][0]) > 1}


def _worst(values: Mapping[str, Spread], limit: float, digits: int = 2) -> Verdict:
    """Combine several meshes or launchers: met if all meet the limit."""
    text = "; ".join(f"{name}: {value.text(digits)}" for name, value in values.items())
    return Verdict(text, all(value.median <= limit for value in values.values()))


def _sharded_memory(document: Document) -> Verdict:
    beyond = {}
    for cell in document["cells"]:
        share_bytes = cell["image_bytes"] / cell["ranks"]
        beyond[cell["mesh"]] = (sharded.holders(cell)["rank"] - share_bytes) / _MIB
    text = "; ".join(f"{mesh}: share + {extra:.0f} MiB" for mesh, extra in beyond.items())
    return Verdict(text, all(extra <= 64 for extra in beyond.values()))


def _nobody_has_all(document: Document) -> Verdict:
    """Require every process to take less memory than the whole state; a rank's own shards do not count."""
    parts = {
        f"{cell['mesh']}, {name}": nbytes / cell["image_bytes"]
        for cell in document["cells"]
        for name, nbytes in sharded.holders(cell).items()
    }
    most = max(parts, key=lambda name: parts[name])
    return Verdict(f"at most {parts[most]:.2f} ({most})", parts[most] < 1)


def _sharded_sent(document: Document) -> Verdict:
    parts = {cell["mesh"]: cell["sent_bytes"] / cell["image_bytes"] for cell in document["cells"]}
    text = "; ".join(f"{mesh}: {part:.4f}" for mesh, part in parts.items())
    return Verdict(text, all(round(part, 2) == 1.0 for part in parts.values()))


def _onto_meshes(document: Document) -> Verdict:
    found = {}
    for of in document["restores"]:
        ours, theirs = (columns(of["rounds"], how, "seconds") for how in (OURS, DCP))
        found[of["mesh"]] = ratios(ours, theirs)
    return _worst(found, 1.0)


def _restored_memory(document: Document) -> Verdict:
    most = {of["mesh"]: max(columns(of["rounds"], OURS, "grown_bytes")) / _MIB for of in document["restores"]}
    text = "; ".join(f"{mesh}: {value:.0f} MiB" for mesh, value in most.items())
    return Verdict(text, all(value <= 256 for value in most.values()))


def _effective(document: Document) -> Verdict:
    """Judge the effective time that `goodput` computes by a model."""
    ours = {of["mtbf_hours"]: of["effective"] for of in document["effective"] if of["strategy"] == TENTH}
    text = "; ".join(f"{100 * share:.1f} % at {60 * mtbf:.0f} min" for mtbf, share in ours.items())
    wanted = zip(ours.values(), EFFECTIVE.values(), strict=True)
    return Verdict(text, all(share >= least for share, least in wanted))


def _loss_beside(peer: str) -> Callable[[Document], Verdict]:
    def judge(document: Document) -> Verdict:
        ours, theirs = (
            [1 - of["effective"] for of in document["effective"] if of["strategy"] == name]
            for name in (OURS, peer)
        )
        value = ratios(ours, theirs)
        return Verdict(f"{value.least:.2f} to {value.greatest:.2f}", value.greatest <= 0.5)

    return judge


def _shared(way: str, limit: float) -> Callable[[Document], Verdict]:
    """Judge several stagers: times until staged and durable as parts of one stager's."""

    def judge(document: Document) -> Verdict:
        named = {"staged": _STAGED, "durable": _DONE}
        return _worst(
            {what: shares.against_one(document, way, figure) for what, figure in named.items()}, limit
        )

    return judge


def _commit(document: Document) -> Verdict:
    added = {way: shares.added(document, way) for way, of in document["stagers"].items() if of > 1}
    text = "; ".join(f"{way} stagers: {trips}, {of} requests" for way, (trips, of) in added.items())
    return Verdict(text, all(trips <= 2 for trips, _ in added.values()))


_DONE, _STALL, _STAGED = "done_seconds", "stall_seconds", "staged_seconds"
_SAVE = "torch.save+fsync"
_OVER = "raw_over"

TARGETS = (
    Target(
        "CST, GPT-2, device-like",
        "at most 1 % of torch.save+fsync",
        "table",
        lambda d: _at_most(_of(("holdfast", _STALL), (_SAVE, _STALL))(d), 0.01, percent=True),
    ),
    Target(
        "CST, GPT-2, device-like",
        "at most 25 % of the best DCP async_save",
        "table",
        lambda d: _at_most(_best_dcp(d, _STALL, ours_over=True), 0.25, percent=True),
    ),
    Target("layer-wise / coarse gate, stall", "at most a third", "gate", _gate, gate_limit),
    Target(
        "PGT-1: bandwidth of raw MPI",
        "at least 70 %",
        "table",
        lambda d: _at_least(_of(("raw_mpi", _DONE), ("holdfast", _STAGED))(d), 0.7, percent=True),
        pipeline(_STAGED, "raw_mpi"),
    ),
    Target(
        "PGT-2: bandwidth of raw O_DIRECT, a new file",
        "at least 90 %",
        "table",
        lambda d: _at_least(_of(("raw_direct", _DONE), ("holdfast", _DONE))(d), 0.9, percent=True),
        pipeline(_DONE, "raw_direct"),
    ),
    Target(
        "PGT-2: bandwidth of raw O_DIRECT, over an old file",
        "at least 90 %",
        "table",
        lambda d: _at_least(_of((_OVER, _DONE), ("holdfast", _DONE))(d), 0.9, percent=True),
        pipeline(_DONE, _OVER),
    ),
    Target(
        "PGT-1 / staged by the bare pipeline",
        "at most 1.2",
        "table",
        lambda d: _at_most(_of(("holdfast", _STAGED), ("raw_pipeline", _STAGED))(d), 1.2),
    ),
    Target(
        "PGT-2 / written by the bare pipeline",
        "at most 1.1",
        "table",
        lambda d: _at_most(_of(("holdfast", _DONE), ("raw_pipeline", _DONE))(d), 1.1),
    ),
    Target(
        "PGT-2 against torch.save+fsync",
        "4 times faster",
        "table",
        lambda d: _at_least(_of((_SAVE, _DONE), ("holdfast", _DONE))(d), 4),
        bare_is(_SAVE),
    ),
    Target(
        "PGT-2 against the best DCP async_save",
        "7 times faster",
        "table",
        lambda d: _at_least(_best_dcp(d, _DONE, ours_over=False), 7),
        bare_is("dcp-thread", "dcp-process"),
    ),
    Target(
        "PGT-2 against MLC-base",
        "10 times faster",
        "table",
        lambda d: _at_least(_of(("mlc-base", _DONE), ("holdfast", _DONE))(d), 10),
        bare_is("mlc-base"),
    ),
    Target(
        "PGT-2 on S3: bare multipart upload",
        "at least 85 %",
        "s3",
        lambda d: _at_least(_of((s3.RAW, _DONE), ("holdfast", _DONE))(d), 0.85, percent=True),
        server_share,
    ),
    Target(
        "makespan, GPT-2, every 10 iterations", "within 1 %", "makespan", _overhead(10, 0.01), bare_share(10)
    ),
    Target(
        "makespan, GPT-2, every 2 iterations", "within 5 %", "makespan", _overhead(2, 0.05), bare_share(2)
    ),
    Target(
        "makespan, GPT-2, every 3 iterations", "within 2 %", "makespan", _overhead(3, 0.02), bare_share(3)
    ),
    Target(
        "makespan, ResNet-50, every iteration",
        "within 3 %",
        "workloads",
        _overhead(1, 0.03, "resnet50"),
        bare_save("resnet50", 1),
    ),
    Target(
        "interval at 5 % overhead, CheckFreq",
        "10 times more frequent",
        "makespan",
        _more_often("checkfreq", 10),
    ),
    Target(
        "interval at 5 % overhead, torch.save",
        "50 times more frequent",
        "makespan",
        _more_often(_SAVE, 50),
    ),
    Target(
        "restore from disk, cold, torch.load",
        "4 times faster",
        "restore",
        _restore("rounds", "torch.load", 4),
        raw_read,
    ),
    Target(
        "restore from disk, cold, torch.load with mmap",
        "not slower",
        "restore",
        _restore("rounds", "torch.load, mmap", 1),
    ),
    Target(
        "restore from disk / a raw read",
        "at most 2",
        "restore",
        lambda d: _restored_in(d, "rounds", OURS, restore.RAW, 2),
    ),
    Target(
        "restore from the ring / from disk",
        "less than 1",
        "restore",
        lambda d: _restored_in(d, "ring_rounds", RING, OURS, 1),
    ),
    Target("local tiers: bytes written per byte of state", "at most 1.01", "tiers", _written),
    Target("NVMe tier: bandwidth of raw O_DIRECT", "at least 90 %", "tiers", _nvme),
    Target(
        "restore from S3, torch.load by s3torchconnector",
        "3 times faster",
        "s3",
        _restore("restores", "s3torchconnector", 3),
        raw_ranges,
    ),
    Target(
        "FSDP2: save() until torch.load opens one file",
        "at most a third of the best peer's",
        "sharded",
        lambda d: _worst({mesh: sharded.against_best(cell) for mesh, cell in _compared(d).items()}, 1 / 3),
    ),
    Target(
        "FSDP2: stall",
        "at most a quarter of DCP async_save's",
        "sharded",
        lambda d: _worst({mesh: sharded.against_dcp(cell) for mesh, cell in _compared(d).items()}, 0.25),
    ),
    Target("FSDP2: memory of a rank beyond its own shards", "share + 64 MiB", "sharded", _sharded_memory),
    Target("FSDP2: part of the state that a process has", "nobody has all", "sharded", _nobody_has_all),
    Target("FSDP2: sent by all ranks / image", "1.00", "sharded", _sharded_sent),
    Target("FSDP2 on 4 ranks, restored onto another mesh", "at most DCP's time", "sharded", _onto_meshes),
    Target(
        "FSDP2, restored onto another mesh: memory of a rank",
        "own shards + 256 MiB",
        "sharded",
        _restored_memory,
    ),
    Target(
        "bandwidth into the ring over TCP / bare sockets",
        "at least 0.85",
        "transport",
        lambda d: _at_least(transport.bandwidth(d), 0.85),
    ),
    Target(
        "the same over a link of 2 Gb/s",
        "at least 95 % of the link",
        "transport",
        lambda d: _at_least(transport.of_link(d), 0.95, percent=True),
    ),
    Target(
        "CPU time of the stager, TCP / MPI over TCP",
        "no more",
        "transport",
        lambda d: _at_most(transport.cpu(d), 1.0),
    ),
    Target(
        "stall under torchrun / under mpirun",
        "at most 1.1",
        "launchers",
        lambda d: _at_most(launchers.stall(d), 1.1),
    ),
    Target(
        "all ranks killed, until the first new step: holdfast run / torchrun beside a running stager",
        "at least 1.3",
        "launchers",
        lambda d: _at_least(launchers.relaunch(d), 1.3),
    ),
    Target(
        "all ranks killed: what holdfast adds to the start of the same script",
        "at most 1 s",
        "launchers",
        _added("start_seconds", 1.0),
    ),
    Target(
        "all ranks killed: what holdfast adds for the restore",
        "at most 1.5 s",
        "launchers",
        _added("restore_seconds", 1.5),
    ),
    Target(
        "effective training time, a model: MTBF 10 min, 3 h, 8 h",
        "at least 94, 97, 99 %",
        "goodput",
        _effective,
    ),
    Target(
        "time lost, a model, as a part of torch.save's at its best interval",
        "at most half",
        "goodput",
        _loss_beside(_SAVE),
    ),
    Target(
        "time lost, a model, as a part of DCP async_save's at its best interval",
        "at most half",
        "goodput",
        _loss_beside("dcp-thread"),
    ),
    Target("two stagers / one, each behind a link of its own", "at most 0.6", "shares", _shared("2", 0.6)),
    Target("four stagers / one, each behind a link of its own", "at most 0.35", "shares", _shared("4", 0.35)),
    Target("round trips that the commit of several stagers adds", "at most 2", "shares", _commit),
    Target("CPU seconds of a checkpoint, all processes", "at most 0.8", "table", _cpu_seconds),
    Target("memory of a rank, N = 1", "slice + 64 MiB", "table", _memory),
    Target("memory over 200 checkpoints", "flat", "steady", _flat),
)


def grid(documents: Mapping[str, Document | None], *, only: str = "", where: str = "") -> Grid:
    """Return all targets that these documents cover, or those of one experiment, with their verdicts.

    Args:
        documents: All from one machine, as a limit may be computed from two of them.
        where: Name of that machine, for the title.
    """
    rows = []
    for target in TARGETS:
        document = documents.get(target.experiment)
        if only not in ("", target.experiment) or document is None:
            continue
        verdict = target.judge(document)
        got = verdict.got if verdict else "not measured"
        met = ("yes" if verdict.met else "no") if verdict else ""
        rows.append((target.what, target.wanted, got, met, target.limit(documents)))
    names = ("figure", "wanted", "measured", "met", "the machine's own limit")
    title = "Targets, results, limiting factor"
    return Grid(f"{title}: {where}" if where else title, names, tuple(rows))
