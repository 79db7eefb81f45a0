"""Draws the pictures of docs/performance.md from the committed JSON: the same input gives the same bytes.

Each picture's metadata names the command that measured its figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.experiments import tiered
from benchmarks.experiments.makespan import common, overheads
from benchmarks.experiments.table import medians
from benchmarks.peers import NEVER_DURABLE, PEERS
from benchmarks.spread import Spread, percentile, spread

__all__ = ["PICTURES", "draw", "draw_all"]

FOLDER = results.COMMITTED.parent
_OURS, _THEIRS = "#0b6e4f", "#9aa5b1"
_COLOURS = ("#0b6e4f", "#d1495b", "#edae49", "#00798c", "#66417a", "#8d5a3c", "#9aa5b1", "#30343f")
_TEXT_SIZE = 9

Axes = Any  # matplotlib's types do not cover all calls here
Document = Mapping[str, Any]


def _bars(
    axes: Axes, names: Sequence[str], values: Sequence[Spread], *, unit: str, log: bool = False
) -> None:
    """Horizontal bars with their spread as whiskers, the first on top."""
    places = range(len(names) - 1, -1, -1)
    medians_ = [value.median for value in values]
    below = [max(0.0, value.median - value.least) for value in values]
    above = [max(0.0, value.greatest - value.median) for value in values]
    colours = [_OURS if name.startswith("holdfast") else _THEIRS for name in names]
    axes.barh(places, medians_, color=colours, xerr=[below, above], error_kw={"lw": 1, "capsize": 2})
    axes.set_yticks(places, names)
    if log:
        axes.set_xscale("log")
        axes.tick_params(axis="x", which="minor", labelbottom=False)
    axes.set_xlabel(unit)


def _lines(
    axes: Axes, series: Mapping[str, tuple[Sequence[float], Sequence[Spread]]], *, x: str, y: str
) -> None:
    for colour, (name, (places, values)) in zip(_COLOURS, series.items(), strict=False):
        axes.plot(places, [value.median for value in values], "o-", color=colour, label=name, ms=4)
        least, most = [value.least for value in values], [value.greatest for value in values]
        axes.fill_between(places, least, most, color=colour, alpha=0.15, lw=0)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    _legend(axes)


def _legend(axes: Axes) -> None:
    """Put the legend beside the picture: matplotlib's search for a free place takes seconds on busy cores."""
    axes.legend(
        fontsize=_TEXT_SIZE - 1,
        frameon=False,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.0,
    )


def _of_table(document: Document, figure: str) -> tuple[list[str], list[Spread]]:
    names, values = [], []
    for peer in PEERS:
        if peer in NEVER_DURABLE and figure == "done_seconds":
            continue
        value = medians(document["rounds"], peer, figure)
        if value is not None:
            names.append(peer)
            values.append(value)
    return names, values


def _cst(axes: Axes, document: Document) -> None:
    _bars(
        axes, *_of_table(document, "stall_seconds"), unit="stall of one checkpoint (CST), seconds", log=True
    )


def _pgt(axes: Axes, document: Document) -> None:
    names, values = _of_table(document, "done_seconds")
    for peer, name in (
        ("holdfast", "holdfast, staged (PGT-1)"),
        ("mlc-base", "mlc-base, received (PGT-1)"),
        ("gemini-like", "gemini-like, in a peer's memory"),
    ):
        staged = medians(document["rounds"], peer, "staged_seconds")
        if staged is not None:
            names.append(name)
            values.append(staged)
    for peer, name in (("raw_direct", "raw O_DIRECT write"), ("raw_mpi", "raw MPI transfer")):
        value = medians(document["rounds"], peer, "done_seconds")
        if value is not None:
            names.append(name)
            values.append(value)
    _bars(axes, names, values, unit="until durable (PGT-2), seconds")


def _phases(axes: Axes, document: Document) -> None:
    phases = document["phases"]
    names = [f"holdfast: {name.removesuffix('_seconds')}" for name in phases]
    _bars(axes, names, [Spread(**of) for of in phases.values()], unit="seconds of each phase; they overlap")


def _makespan(axes: Axes, document: Document) -> None:
    runs = document["runs"]
    every = common(runs)
    names, values = [], []
    for peer in dict.fromkeys(run["peer"] for run in runs):
        value = overheads(runs, peer, every) if peer != "none" else None
        if value is not None:
            names.append(peer)
            values.append(Spread(value.median + 1, value.least + 1, value.greatest + 1))
    _bars(axes, names, values, unit=f"makespan, a checkpoint every {every} iterations; no checkpoint = 1")
    axes.axvline(1.0, color="black", lw=0.8)


def _throughput(axes: Axes, document: Document) -> None:
    runs = [run for run in document["runs"] if run["model"] == "resnet50"]
    series = {}
    for peer in dict.fromkeys(run["peer"] for run in runs):
        places = sorted({run["every"] for run in runs if run["peer"] == peer})
        series[peer] = (
            places,
            [
                spread(
                    [
                        run["iterations"] / run["makespan_seconds"]
                        for run in runs
                        if run["peer"] == peer and run["every"] == every
                    ]
                )
                for every in places
            ],
        )
    ordered = {name: series[name] for name in ("holdfast", *(peer for peer in series if peer != "holdfast"))}
    _lines(axes, ordered, x="a checkpoint every … iterations", y="iterations per second")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)


def _every_iteration(axes: Axes, document: Document) -> None:
    _makespans(axes, document, 1, "a checkpoint in every iteration")


def _workloads(axes: Axes, document: Document) -> None:
    _makespans(axes, document, 10, "a checkpoint every 10 iterations")


def _makespans(axes: Axes, document: Document, every: int, how: str) -> None:
    names, values = [], []
    for model in document["image_bytes"]:
        runs = [run for run in document["runs"] if run["model"] == model]
        for peer in dict.fromkeys(run["peer"] for run in runs):
            value = overheads(runs, peer, every) if peer != "none" else None
            if value is not None:
                names.append(f"{peer}, {model}")
                values.append(Spread(value.median + 1, value.least + 1, value.greatest + 1))
    _bars(axes, names, values, unit=f"makespan, {how}; no checkpoint = 1")
    axes.axvline(1.0, color="black", lw=0.8)


def _flights(axes: Axes, document: Document) -> None:
    series = {}
    for in_flight in sorted({run["in_flight"] for run in document["runs"]}):
        runs = [run for run in document["runs"] if run["in_flight"] == in_flight]
        places, values = [], []
        for every in sorted({run["every"] for run in runs}):
            value = overheads(runs, "holdfast", every)
            if value is not None:
                places.append(every)
                values.append(Spread(value.median + 1, value.least + 1, value.greatest + 1))
        series[f"holdfast, N = {in_flight}"] = (places, values)
    _lines(axes, series, x="a checkpoint every … iterations", y="makespan; no checkpoint = 1")


_FIGURES = {
    "done_seconds": "durable (PGT-2)",
    "staged_seconds": "staged (PGT-1)",
    "stall_seconds": "stall (CST)",
}


def _cells(axes: Axes, document: Document, place: Callable[[Document], float], x: str) -> None:
    series = {
        name: (
            [place(of) for of in document["cells"]],
            [spread([figures[figure] for figures in of["rounds"]]) for of in document["cells"]],
        )
        for figure, name in _FIGURES.items()
    }
    _lines(axes, series, x=x, y="seconds")
    axes.set_ylim(bottom=0)


def _slices(axes: Axes, document: Document) -> None:
    _cells(axes, document, lambda of: float(of["ranks"]), "ranks, each sends one slice (two cores)")


def _shards(axes: Axes, document: Document) -> None:
    bits = document["rank_bits"]
    series: dict[str, tuple[list[float], list[Spread]]] = {}
    for of in sorted(document["cells"], key=lambda of: (of["image_bytes"], of["wide_as"], of["ranks"])):
        link = f"stager's link: {of['wide_as'] * bits / 1e6:.0f} Mb/s"
        places, values = series.setdefault(f"{of['image_bytes'] / 1e6:.0f} MB, {link}", ([], []))
        places.append(float(of["ranks"]))
        values.append(spread([figures["staged_seconds"] for figures in of["rounds"]]))
    _lines(axes, series, x=f"ranks, each with a link of {bits / 1e6:.0f} Mb/s", y="until staged, seconds")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")


def _rings(axes: Axes, document: Document) -> None:
    image_bytes = document["image_bytes"]
    _cells(axes, document, lambda of: of["ring_bytes"] / image_bytes, "size of the ring / size of the image")
    axes.axvline(1.0, color="black", lw=0.8, ls=":")


def _models(axes: Axes, document: Document) -> None:
    series: dict[str, tuple[list[float], list[Spread]]] = {}
    for of in sorted(document["models"].values(), key=lambda of: of["image_bytes"]):
        for name, peer, figure in (
            ("holdfast, stall", "holdfast", "stall_seconds"),
            ("holdfast, staged", "holdfast", "staged_seconds"),
            ("holdfast, durable", "holdfast", "done_seconds"),
            ("pccheck-like, durable", "pccheck-like", "done_seconds"),
            ("torch.save+fsync", "torch.save+fsync", "done_seconds"),
            ("mlc-base, durable", "mlc-base", "done_seconds"),
        ):
            value = medians(of["rounds"], peer, figure)
            if value is not None:
                places, values = series.setdefault(name, ([], []))
                places.append(of["image_bytes"] / 1e9)
                values.append(value)
    _lines(axes, series, x="size of the checkpoint, GB; ten models", y="seconds")
    axes.set_xscale("log")
    axes.set_yscale("log")


def _gate(axes: Axes, document: Document) -> None:
    names, values = [], []
    for of in document["cells"]:
        where = f"computation {of['compute_seconds'] * 1000:.0f}, update {of['update_seconds'] * 1000:.0f} ms"
        for way in ("layer-wise", "coarse"):
            names.append(f"{'holdfast, ' if way == 'layer-wise' else ''}{way}: {where}")
            values.append(spread([1000 * figures[way]["stall_seconds"] for figures in of["rounds"]]))
    _bars(
        axes, names, values, unit=f"wait at the update, ms (a copy: {1000 * document['copy_seconds']:.0f} ms)"
    )


def _jitter(axes: Axes, document: Document) -> None:
    seconds = document["iteration_seconds"]
    ordered = sorted(seconds, key=lambda name: name != "holdfast")
    for colour, peer in zip(_COLOURS, ordered, strict=False):
        percents = [50, 75, 90, 95, 98, 99, 99.5, 100]
        places = [100 - percent if percent < 100 else 0.25 for percent in percents]
        values = [1000 * percentile(seconds[peer], percent) for percent in percents]
        axes.plot(places, values, "o-", ms=3, color=colour, label=peer)
    axes.set_xscale("log")
    axes.invert_xaxis()
    axes.set_xlabel("percent of iterations that take longer")
    axes.set_ylabel("milliseconds")
    _legend(axes)


def _restore(axes: Axes, document: Document) -> None:
    ways = list(document["rounds"][0])
    ways.sort(key=lambda way: way != "holdfast")
    values = [spread([figures[way]["seconds"] for figures in document["rounds"]]) for way in ways]
    _bars(axes, ways, values, unit="restore from a cold disk, seconds")


def _s3(axes: Axes, document: Document) -> None:
    names = list(document["rounds"][0])
    names.sort(key=lambda name: name != "holdfast")
    values = [spread([figures[name]["done_seconds"] for figures in document["rounds"]]) for name in names]
    _bars(axes, names, values, unit="until durable in the S3 server, seconds")


def _scaling(axes: Axes, document: Document) -> None:
    series = {}
    cells = document["cells"]
    for name, key in (("by ranks (100 tensors)", "ranks"), ("by tensors (2 ranks)", "tensors")):
        fixed = [of for of in cells if (of["tensors"] == 100 if key == "ranks" else of["ranks"] == 2)]
        fixed.sort(key=lambda of: of[key])
        writes = [
            of["per_save"]["stager"]["write_calls"] + of["per_save"]["flusher"]["write_calls"] for of in fixed
        ]
        series[name] = ([of[key] for of in fixed], [Spread(value, value, value) for value in writes])
    _lines(axes, series, x="ranks, or tensors", y="write calls per checkpoint")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)


def _steady(axes: Axes, document: Document) -> None:
    samples = document["samples"]
    for colour, name in zip(_COLOURS, ("trainer", "stager", "flusher"), strict=False):
        axes.plot(
            [of["saves"] for of in samples],
            [of[name] / 1e6 for of in samples],
            "o-",
            ms=3,
            color=colour,
            label=name,
        )
    axes.set_xlabel("checkpoints")
    axes.set_ylabel("resident MB")
    axes.set_ylim(bottom=0)
    _legend(axes)


def _tiers(axes: Axes, document: Document) -> None:
    """Draw the bandwidth of each tier at its best number of writers, beside the bare device."""
    best: dict[str, tuple[str, list[float]]] = {}
    for name in document["how"]:
        kind = name.partition(",")[0]
        seconds = [figures[name]["seconds"] for figures in document["rounds"]]
        if kind not in best or spread(seconds).median < spread(best[kind][1]).median:
            best[kind] = (name, seconds)
    values = {f"holdfast: {name}": seconds for name, seconds in best.values()}
    values["raw O_DIRECT write"] = [
        figures[f"raw beside {best['nvme'][0]}"]["seconds"] for figures in document["rounds"]
    ]
    speeds = [spread([document["slice_bytes"] / 1e9 / value for value in of]) for of in values.values()]
    _bars(axes, list(values), speeds, unit="GB/s of one rank's slice, from memory until it is sealed")


def _layouts(axes: Axes, document: Document) -> None:
    names, values = [], []
    for model, of in document["layouts"].items():
        for way in ("apart", "interleaved"):
            for what in ("save", "load"):
                names.append(f"{'holdfast, ' if way == 'apart' else ''}{way}: {what}, {model}")
                values.append(spread([1000 * figures[way][f"{what}_seconds"] for figures in of["rounds"]]))
    _bars(axes, names, values, unit="ms of one copy")


def _tiered(axes: Axes, document: Document) -> None:
    series: dict[str, tuple[list[int], list[Spread]]] = {}
    for of in document["runs"]:
        if of["tier"] == "nvme":
            places = tiered.intervals(of)
            parts = [tiered.overhead(of, every) for every in places]
            values = [
                Spread(*(1 + part / 100 for part in (of.median, of.least, of.greatest))) for of in parts
            ]
            series[f"N = {of['in_flight']}, p = {of['writers']}"] = (places, values)
    _lines(axes, series, x="a checkpoint every … iterations", y="makespan; no checkpoint = 1")


def _recovery(axes: Axes, document: Document) -> None:
    found: dict[str, Spread] = {}
    for of in document["runs"]:
        found.setdefault(f"holdfast: {of['tier']}", spread(of["restore_seconds"]))
    _bars(axes, list(found), list(found.values()), unit="restore of both ranks, seconds")


def _accuracy(axes: Axes, document: Document) -> None:
    """Draw accuracy by epoch: the killed training's points should lie on the other's line."""
    for name, style, colour in (("undisturbed", "-", _THEIRS), ("killed", ".", _OURS)):
        points = document["curves"][name]
        label = "killed and resumed after each tenth epoch" if name == "killed" else name
        accuracies = [100 * point["right"] / point["of"] for point in points]
        axes.plot([point["epoch"] for point in points], accuracies, style, color=colour, label=label)
    for kill in document["kills"]:
        axes.axvline(kill["epoch"], color="black", lw=0.6, ls=":")
    axes.set_xlabel("epoch")
    axes.set_ylabel("accuracy on the test set, %")
    _legend(axes)


def _interrupted(axes: Axes, document: Document) -> None:
    """Draw accuracy over time: a kill costs the restart and about half an epoch."""
    for name, colour in (("undisturbed", _THEIRS), ("killed", _OURS)):
        accuracies = [100 * point["right"] / point["of"] for point in document["curves"][name]]
        label = "killed and resumed" if name == "killed" else name
        axes.plot(document["times"][name], accuracies, ".-", color=colour, label=label, ms=4, lw=1)
    for kill in document["kills"]:
        until = kill["after_seconds"] + kill["resumption_seconds"]
        axes.axvspan(kill["after_seconds"], until, color="black", alpha=0.08, lw=0)
    axes.set_xlabel("seconds since the first step; grey: from a kill until training goes on")
    axes.set_ylabel("accuracy on the test set, %")
    _legend(axes)


# Picture → experiment, title, function that draws it.
PICTURES: dict[str, tuple[str, str, Callable[[Axes, Document], None]]] = {
    "makespan": ("makespan", "Makespan of a training (ACUTE fig. 7)", _makespan),
    "pgt": ("table", "Time until a checkpoint is safe (ACUTE fig. 8)", _pgt),
    "cst": ("table", "Stall of the training (ACUTE fig. 9)", _cst),
    "phases": ("table", "Where the time goes (ACUTE fig. 10)", _phases),
    "slices": ("slices", "By number of slices (ACUTE fig. 11)", _slices),
    "shards": ("shards", "Parallel shards, a link for each rank (ACUTE fig. 11)", _shards),
    "rings": ("rings", "By size of the stager's ring (ACUTE fig. 12)", _rings),
    "throughput": ("workloads", "Throughput by checkpoint interval, ResNet-50 (PCcheck fig. 8)", _throughput),
    "models": ("models", "One checkpoint of ten models (ACUTE figs. 8, 9, PCcheck fig. 11)", _models),
    "flights": ("flights", "Slowdown by checkpoints in flight and interval (PCcheck fig. 12)", _flights),
    "gate": ("gate", "With and without the layer-wise pipeline (LightCheck fig. 10)", _gate),
    "workloads": ("workloads", "Makespan of other models (ACUTE fig. 7)", _workloads),
    "resnet": ("workloads", "A checkpoint in every iteration", _every_iteration),
    "jitter": ("jitter", "Iterations of a Python-heavy loop", _jitter),
    "restore": ("restore", "Restore from a disk, page cache cold", _restore),
    "s3": ("s3", "Into an S3 server on the same two cores", _s3),
    "scaling": ("scaling", "What grows with ranks and tensors", _scaling),
    "steady": ("steady", "Memory over many checkpoints", _steady),
    "tiers": ("tiers", "Local tiers beside the bare device", _tiers),
    "layouts": ("tiers", "Mapping apart or between the tensors (LightCheck fig. 11)", _layouts),
    "tiered": ("tiered", "Slowdown by checkpoints in flight and writers (PCcheck figs. 12, 13)", _tiered),
    "recovery": ("tiered", "Recovery from each tier (LightCheck fig. 6)", _recovery),
    "accuracy": ("accuracy", "Restarted after every tenth epoch: accuracy (ACUTE fig. 13)", _accuracy),
    "interrupted": ("accuracy", "Accuracy over time with interruptions (LightCheck fig. 15)", _interrupted),
}


def draw(name: str, document: Document, folder: Path = FOLDER) -> Path:
    """Draw one picture of `PICTURES`; return its file."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    _, title, how = PICTURES[name]
    style: Any = {"svg.hashsalt": "holdfast", "svg.fonttype": "none", "font.size": _TEXT_SIZE}
    with mpl.rc_context(style):
        figure, axes = plt.subplots(figsize=(7.0, 3.6), layout="constrained")
        try:
            axes.spines[["top", "right"]].set_visible(False)
            figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=_TEXT_SIZE + 1)
            how(axes, document)
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{name}.svg"
            about = {
                "Title": title,
                "Description": f"measured by `{document['command']}`, drawn by `make figures`",
                "Creator": "holdfast benchmarks",
                "Date": None,
            }
            figure.savefig(path, format="svg", metadata=about)
        finally:
            plt.close(figure)
    return path


def draw_all() -> list[Path]:
    """Draw every picture whose experiment was measured."""
    drawn = []
    for name, (experiment, _, _) in PICTURES.items():
        document = results.read(experiment)
        if document is not None:
            drawn.append(draw(name, document))
    return drawn
