"""Where holdfast is behind a peer, or shows less than a paper: the first sentence below a table, from its document.

Medians are compared; whether their spreads overlap stands in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.experiments import goodput, interference, tiered
from benchmarks.experiments.makespan import cpu_seconds, overheads
from benchmarks.experiments.table import medians
from benchmarks.peers import NEVER_DURABLE, PEERS
from benchmarks.spread import columns, spread

__all__ = ["behind"]

Document = Mapping[str, Any]
_OURS = "holdfast"


def behind(document: Document) -> str:
    """Return one sentence, or "" where holdfast is ahead everywhere or the document compares no peers."""
    find = _FINDERS.get(document["experiment"])
    found = list(find(document)) if find else []
    return f"**Here holdfast is behind:** {'; '.join(found)}." if found else ""


def _less(what: str, ours: float, others: Mapping[str, float], unit: str, digits: int) -> Iterator[str]:
    """Name the peers whose figure is lower than holdfast's; lower is better."""
    ahead = {name: value for name, value in others.items() if round(value, digits) < round(ours, digits)}
    if ahead:
        named = ", ".join(f"{name} {value:.{digits}f}{unit}" for name, value in ahead.items())
        yield f"{what}: {ours:.{digits}f}{unit} against {named}"


def _table(document: Document) -> Iterator[str]:
    for what, figure in (
        ("stall", "stall_seconds"),
        ("staged", "staged_seconds"),
        ("durable", "done_seconds"),
    ):
        chosen = [peer for peer in PEERS if figure != "done_seconds" or peer not in NEVER_DURABLE]
        values = {peer: medians(document["rounds"], peer, figure) for peer in chosen}
        found = {peer: value.median for peer, value in values.items() if value is not None}
        if _OURS in found:
            yield from _less(what, found.pop(_OURS), found, " s", 3)


def _models(document: Document) -> Iterator[str]:
    for model, of in document["models"].items():
        for what, figure in (("stall", "stall_seconds"), ("durable", "done_seconds")):
            values = {
                peer: medians(of["rounds"], peer, figure) for peer in PEERS if peer not in NEVER_DURABLE
            }
            found = {peer: value.median for peer, value in values.items() if value is not None}
            yield from _less(f"{model}, {what}", found.pop(_OURS), found, " s", 3)


def _runs(runs: list[dict[str, Any]], what: str) -> Iterator[str]:
    peers = dict.fromkeys(run["peer"] for run in runs if run["peer"] not in {"none", _OURS})
    for every in sorted({run["every"] for run in runs}):
        ours = overheads(runs, _OURS, every)
        values = {peer: overheads(runs, peer, every) for peer in peers}
        found = {peer: 100 * value.median for peer, value in values.items() if value is not None}
        if ours is not None:
            yield from _less(f"{what}every {every}", 100 * ours.median, found, " %", 1)


def _makespan(document: Document) -> Iterator[str]:
    yield from _runs(document["runs"], "")
    cost = cpu_seconds(document["runs"])
    yield from _less("CPU of one checkpoint", cost.pop(_OURS), cost, " s", 2)


def _workloads(document: Document) -> Iterator[str]:
    for model in document["image_bytes"]:
        yield from _runs([run for run in document["runs"] if run["model"] == model], f"{model}, ")


def _epochs(document: Document) -> Iterator[str]:
    yield from _runs(document["runs"], "")


def _restore(document: Document) -> Iterator[str]:
    yield from _rounds("restore", document["rounds"], "seconds")


def _sharded(document: Document) -> Iterator[str]:
    for cell in document["cells"]:
        for what, figure in (("one file opens", "done_seconds"), ("stall", "stall_seconds")):
            yield from _rounds(f"{cell['mesh']}, {what}", cell["rounds"], figure)
    for of in document["restores"]:
        yield from _rounds(f"restore onto {of['mesh']}", of["rounds"], "seconds")


def _s3(document: Document) -> Iterator[str]:
    yield from _rounds("stall", document["rounds"], "stall_seconds")
    yield from _rounds("durable", document["rounds"], "done_seconds")
    yield from _rounds("restore", document["restores"], "seconds")


def _rounds(what: str, rounds: list[dict[str, Any]], figure: str) -> Iterator[str]:
    """Compare one figure across all ways; the bare machine's ways are no peers."""
    ways = [way for way in rounds[0] if not way.startswith(("raw", "bare"))]
    found = {way: spread(values).median for way in ways if (values := columns(rounds, way, figure))}
    yield from _less(what, found.pop(_OURS), found, " s", 3)


def _interference(document: Document) -> Iterator[str]:
    """Check CheckFreq's claim that the adaptive interval costs less than a static one."""
    adaptive, static = (
        100 * interference.overheads(document, name).median
        for name in (interference.ADAPTIVE, interference.STATIC)
    )
    yield from _less("overhead of the adaptive interval", adaptive, {"the static one": static}, " %", 1)


def _effective(document: Document) -> Iterator[str]:
    ways = document["rounds"][0]["ways"]
    shares = {
        way: spread([100 * of["ways"][way]["real"]["effective"] for of in document["rounds"]]).median
        for way in ways
    }
    yield from _more("effective time", shares.pop(_OURS), shares)


def _flights(document: Document) -> Iterator[str]:
    """Check PCcheck's figure, where more checkpoints in flight cost less."""
    runs = document["runs"]
    counts = sorted({run["in_flight"] for run in runs})
    for every in sorted({run["every"] for run in runs}):
        values = {
            count: overheads([run for run in runs if run["in_flight"] == count], _OURS, every)
            for count in counts
        }
        found = {f"N = {count}": 100 * value.median for count, value in values.items() if value is not None}
        first, *more = found
        for name in more:
            yield from _less(f"every {every}, {name}", found[name], {first: found[first]}, " %", 1)


def _tiered(document: Document) -> Iterator[str]:
    """Check LightCheck's figures, where the layer-wise gate costs less than a coarse one."""
    for of, every in tiered.gated(document):
        layered, coarse = (tiered.overhead(of, every, coarse=which).median for which in (False, True))
        what = f"{of['tier']}, every {every}, layer-wise gate"
        yield from _less(what, layered, {"the coarse gate": coarse}, " %", 1)


def _goodput(document: Document) -> Iterator[str]:
    for every in dict.fromkeys(of["every"] for of in document["goodput"] if of["strategy"] != "ideal"):
        here = [of for of in document["goodput"] if of["every"] == every and of["strategy"] != "ideal"]
        shares = {
            of["strategy"]: 100 * of["share"]["median"] for of in here if "notice" not in of["strategy"]
        }
        yield from _more(f"goodput, every {every}", shares.pop(_OURS), shares)
    for mtbf in dict.fromkeys(of["mtbf_hours"] for of in document["effective"]):
        here = [of for of in document["effective"] if of["mtbf_hours"] == mtbf]
        shares = {of["strategy"]: 100 * of["effective"] for of in here if of["strategy"] != goodput.TENTH}
        yield from _more(f"effective time, MTBF {60 * mtbf:.0f} min", shares.pop(_OURS), shares)


def _more(what: str, ours: float, others: Mapping[str, float]) -> Iterator[str]:
    """Name the peers whose figure is higher than holdfast's; higher is better."""
    ahead = {name: value for name, value in others.items() if round(value, 1) > round(ours, 1)}
    if ahead:
        named = ", ".join(f"{name} {value:.1f} %" for name, value in ahead.items())
        yield f"{what}: {ours:.1f} % against {named}"


_FINDERS: Mapping[str, Callable[[Document], Iterator[str]]] = {
    "table": _table,
    "models": _models,
    "makespan": _makespan,
    "epochs": _epochs,
    "workloads": _workloads,
    "restore": _restore,
    "sharded": _sharded,
    "s3": _s3,
    "interference": _interference,
    "effective": _effective,
    "flights": _flights,
    "tiered": _tiered,
    "goodput": _goodput,
}
