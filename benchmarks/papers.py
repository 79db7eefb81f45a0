"""Judges each table and figure of the four papers from the committed JSON, one row each.

A row says `reproduced`, `beaten`, `in part`, `not reproduced`, `not measured yet`, or `not here` with the reason. A
paper's claim is quoted from its abstract or published artifact, or named by the kind of figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.experiments import epochs, goodput, interference, models, shards, stager_size, tiered
from benchmarks.experiments.makespan import common, overheads, recoveries, shortest, utilisation
from benchmarks.experiments.table import ratio
from benchmarks.grid import Grid
from benchmarks.spread import spread

__all__ = ["RESULTS", "PaperResult", "grid", "shortfalls"]

Document = Mapping[str, Any]
Judged = tuple[str, str]  # verdict, what was measured
_OURS = "holdfast"


@dataclass(frozen=True)
class PaperResult:
    """One table or figure.

    Attributes:
        experiment: `judge` reads its JSON; empty: no experiment exists, and `judge` gives the reason.
    """

    paper: str
    place: str
    claim: str
    experiment: str
    judge: Callable[[Document], Judged]


def _said(verdict: str, text: str) -> Callable[[Document], Judged]:
    return lambda _: (verdict, text)


def _not_here(reason: str) -> Callable[[Document], Judged]:
    return _said("not here", reason)


def _makespan(peer: str, least: str) -> Callable[[Document], Judged]:
    def judge(document: Document) -> Judged:
        runs = document["runs"]
        every = common(runs)
        ours, theirs = (overheads(runs, name, every) for name in (_OURS, peer))
        assert ours is not None
        assert theirs is not None
        text = f"every {every}: {ours.text(1, times=100)} %; {peer} {theirs.text(1, times=100)} %"
        return (least if ours.median < theirs.median else "not reproduced"), text

    return judge


def _once_an_epoch(document: Document) -> Judged:
    found = {every: overheads(document["runs"], _OURS, every) for every in (epochs.EPOCH, epochs.OFTEN)}
    theirs = overheads(document["runs"], "mlc-base", epochs.EPOCH)
    assert theirs is not None
    near = {every: of is not None and of.median <= _NEARLY_ZERO for every, of in found.items()}
    verdict = "beaten" if all(near.values()) else "reproduced" if near[epochs.EPOCH] else "not reproduced"
    texts = [f"every {every} {of.text(1, times=100)} %" for every, of in found.items() if of is not None]
    return verdict, f"{', '.join(texts)}; mlc-base every {epochs.EPOCH} {theirs.text(1, times=100)} %"


_NEARLY_ZERO = 0.01


def _seconds_not_epochs(document: Document) -> Judged:
    often = overheads(document["runs"], _OURS, epochs.OFTEN)
    assert often is not None
    ours = epochs.lost_seconds(document, _OURS, epochs.OFTEN)
    theirs = epochs.lost_seconds(document, _SAVE, epochs.EPOCH)
    met = often.median <= _CHECKFREQ_OVERHEAD and ours.median < theirs.median
    text = (
        f"a kill loses {ours.text(2)} s at every {epochs.OFTEN}, with {often.text(1, times=100)} % overhead"
    )
    return (
        "reproduced" if met else "not reproduced"
    ), f"{text}; {_SAVE} every {epochs.EPOCH} loses {theirs.text(2)} s"


_SAVE = "torch.save+fsync"
_CHECKFREQ_OVERHEAD = 0.035


def _utilisation(document: Document) -> Judged:
    runs, seconds = document["runs"], document["iteration_seconds"]
    every = common(runs)
    shares = {peer: utilisation(runs, peer, every, seconds) for peer in (_OURS, "checkfreq", _SAVE)}
    plain = utilisation(runs, "none", None, seconds)
    text = ", ".join(f"{peer} {value.text(1, times=100)}" for peer, value in shares.items())
    kept = shares[_OURS].median >= (1 - _NEARLY_ZERO) * plain.median
    return (
        ("in part" if kept else "not reproduced"),
        f"no GPU: timed waits, % of the time: {plain.text(1, times=100)} without checkpoints; every {every}: {text}",
    )


def _three_percent(document: Document) -> Judged:
    ours = overheads(document["runs"], _OURS, 10)
    assert ours is not None
    return (
        "reproduced" if ours.median <= 0.03 else "not reproduced"
    ), f"GPT-2, two cores: {ours.text(1, times=100)} %"


def _times(figure: str, peer: str, beaten: float) -> Callable[[Document], Judged]:
    def judge(document: Document) -> Judged:
        value = ratio(document["rounds"], (peer, figure), (_OURS, figure))
        assert value is not None
        return (
            "beaten" if value.median > beaten else "not reproduced"
        ), f"{value.text(1)} times less than {peer}"

    return judge


def _shards(document: Document) -> Judged:
    found = shards.times_faster(document)
    text = ", ".join(f"{ranks} ranks {times:.1f}" for ranks, times in found.items() if ranks > 1)
    return (
        "beaten" if max(found.values()) > _SHARDS_OF_ACUTE else "not reproduced"
    ), f"staged faster: {text} times"


_SHARDS_OF_ACUTE = 1.7


def _contention(document: Document) -> Judged:
    found = shards.beyond_link(document)
    text = ", ".join(f"{ranks} ranks {times:.2f}" for ranks, times in found.items())
    return (
        "reproduced" if min(found.values()) > 1 else "not reproduced"
    ), f"more ranks than fill the stager's link, times as long until staged: {text}"


def _often(document: Document) -> Judged:
    runs = document["runs"]
    ours, theirs = shortest(runs, _OURS), shortest(runs, "checkfreq")
    times = theirs.beyond / ours.within if ours.within else 0.0
    text = f"{ours.text()}; CheckFreq {theirs.text()}: at least {times:.1f} times more often"
    return ("reproduced" if times >= 10 else "not reproduced"), text


def _layer_wise(document: Document) -> Judged:
    texts, gained = [], []
    for of, every in tiered.gated(document):
        layered, coarse = (tiered.overhead(of, every, coarse=which).median for which in (False, True))
        gained.append(layered < coarse)
        part = tiered.gain(of, every).median
        texts.append(
            f"{of['tier']}, every {every}: {layered:.1f} against {coarse:.1f} %, stall {part:.2f} of it"
        )
    verdict = "reproduced" if all(gained) else "in part" if any(gained) else "not reproduced"
    return verdict, f"layer-wise against coarse gate: {'; '.join(texts)}"


def _recovery(document: Document) -> Judged:
    found: dict[str, float] = {}
    for of in document["runs"]:
        found.setdefault(of["tier"], spread(of["restore_seconds"]).median)
    texts = ", ".join(f"{tier} {seconds:.2f} s" for tier, seconds in found.items())
    return "in part", f"{texts}; without the lost iterations"


def _kill_costs(document: Document) -> Judged:
    found = recoveries(document)
    texts = [f"{peer} every {of.every} {of.total - of.restart:.2f} s" for peer, of in found.items()]
    least = min(found, key=lambda peer: found[peer].total)
    return (
        "in part" if least == _OURS else "not reproduced"
    ), f"restore and work done again, computed, each at its interval of 5 %: {', '.join(texts)}"


def _host_memory(document: Document) -> Judged:
    """Compare the stager's ring with PCcheck's bound, which is on memory of a training machine."""
    texts = []
    for of in document["cells"]:
        durable = spread([figures["done_seconds"] for figures in of["rounds"]])
        texts.append(f"{of['ring_bytes'] / document['image_bytes']:.2f} images {durable.text(2)} s")
    return "in part", f"one checkpoint until durable, by the stager's ring: {', '.join(texts)}"


def _flights(document: Document) -> Judged:
    runs, texts, better = document["runs"], [], []
    for every in sorted({run["every"] for run in runs}):
        one, two = (
            overheads([run for run in runs if run["in_flight"] == count], _OURS, every) for count in (1, 2)
        )
        if one is not None and two is not None:
            better.append(two.median < one.median)
            texts.append(f"every {every} {100 * two.median:.1f} against {100 * one.median:.1f} %")
    verdict = "reproduced" if all(better) else "in part" if any(better) else "not reproduced"
    return verdict, f"N = 2 against 1: {'; '.join(texts)}"


def _writers(document: Document) -> Judged:
    of_p = {of["writers"]: of for of in document["runs"] if of["tier"] == "nvme" and of["in_flight"] == 1}
    texts, better = [], []
    for every in tiered.intervals(of_p[1]):
        first, second = (tiered.overhead(of_p[writers], every).median for writers in (1, 2))
        better.append(second < first)
        texts.append(f"every {every} {second:.0f} against {first:.0f} %")
    verdict = "reproduced" if all(better) else "in part" if any(better) else "not reproduced"
    return verdict, f"p = 2 against 1: {'; '.join(texts)}"


def _sizes(document: Document) -> Judged:
    found = models.times_faster(document, _SAVE)
    texts = [
        f"{document['models'][model]['image_bytes'] / 1e9:.2g} GB {of.median:.1f}"
        for model, of in found.items()
    ]
    met = all(of.median > 1 for of in found.values())
    return (
        "in part" if met else "not reproduced"
    ), f"times faster than torch.save: {', '.join(texts)}; to 4 GB only"


def _ten_models(document: Document) -> Judged:
    durable, stall = (
        [of.median for of in models.times_faster(document, "mlc-base", figure).values()]
        for figure in ("done_seconds", "stall_seconds")
    )
    met = sum(times > _FASTER_OF_ACUTE for times in durable)
    verdict = "beaten" if met == len(durable) else "in part" if met else "not reproduced"
    text = f"durable {min(durable):.1f} to {max(durable):.1f}, stall {min(stall):.1f} to {max(stall):.1f} times less"
    return verdict, f"{len(document['models'])} models as shapes; mlc-base beside {len(durable)}: {text}"


_FASTER_OF_ACUTE = 1 / 0.567


def _memory_baselines(document: Document) -> Judged:
    """Compare one checkpoint; `workloads` compares by interval."""
    parts = (("stall", "gpm-like"), ("done", "gpm-like"), ("stall", "gemini-like"), ("staged", "gemini-like"))
    texts, ahead = [], []
    for figure, peer in parts:
        value = ratio(document["rounds"], (peer, f"{figure}_seconds"), (_OURS, f"{figure}_seconds"))
        if value is None:
            return "not measured yet", '`make bench BENCH="table"`'
        ahead.append(value.median > 1)
        texts.append(f"{'durable' if figure == 'done' else figure} of {peer} {value.text(1)}")
    verdict = "beaten" if all(ahead) else "in part" if any(ahead) else "not reproduced"
    return verdict, f"GPT-2, one checkpoint, times as long as holdfast's: {', '.join(texts)}"


def _throughput(document: Document) -> Judged:
    runs = [run for run in document["runs"] if run["model"] == "resnet50"]
    texts, ahead = [], []
    for every in sorted({run["every"] for run in runs}):
        ours, theirs = (overheads(runs, peer, every) for peer in (_OURS, "pccheck-like"))
        assert ours is not None
        assert theirs is not None
        ahead.append(ours.median < theirs.median)
        texts.append(f"every {every} {100 * ours.median:.1f} against {100 * theirs.median:.1f} %")
    verdict = "beaten" if all(ahead) else "in part" if any(ahead) else "not reproduced"
    return verdict, f"ResNet-50, overhead beside pccheck-like: {'; '.join(texts)}"


def _accuracy(document: Document) -> Judged:
    same = document["curves"]["killed"] == document["curves"]["undisturbed"]
    kills = len(document["kills"])
    return (
        "reproduced" if same else "not reproduced"
    ), f"{kills} kills; accuracy of each epoch equal: {'yes' if same else 'no'}"


def _adaptive(document: Document) -> Judged:
    of = {
        name: interference.overheads(document, name) for name in (interference.ADAPTIVE, interference.STATIC)
    }
    better = of[interference.ADAPTIVE].median < of[interference.STATIC].median
    text = ", ".join(f"{name} {value.text(1, times=100)} %" for name, value in of.items())
    return ("reproduced" if better else "not reproduced"), f"overhead beside another job: {text}"


def _model(document: Document) -> Judged:
    found = goodput.best(dict(document))
    text = ", ".join(f"{way} {100 * share:.1f}" for way, (_, share) in found.items() if "notice" not in way)
    theirs = max(share for way, (_, share) in found.items() if not way.startswith(_OURS))
    better = found[_OURS][1] > theirs
    return (
        "in part" if better else "not reproduced"
    ), f"a model, VGG-16 alone, % of the ideal at best intervals: {text}"


def _totals(document: Document) -> Judged:
    hours: dict[str, float] = {}
    for of in document["totals"]:
        if of["mtbf_hours"] == _MTBF_HOURS and of["hours"] is not None:
            hours[of["strategy"]] = min(of["hours"], hours.get(of["strategy"], of["hours"]))
    texts = ", ".join(f"{way} {hours[way]:.2f}" for way in (_OURS, "checkfreq", _SAVE) if way in hours)
    return "in part", f"a model, 8 h of training at an MTBF of {_MTBF_HOURS:g} h: {texts} h"


_MTBF_HOURS = 0.5


def _phases(document: Document) -> Judged:
    named = ("copy", "sending", "write")
    texts = [f"{name} {document['phases'][f'{name}_seconds']['median']:.2f} s" for name in named]
    return "reproduced", f"{', '.join(texts)} of one checkpoint; they overlap"


def _stager_size(document: Document) -> Judged:
    staged, durable = (
        stager_size.times_as_long(dict(document), figure) for figure in ("staged_seconds", "done_seconds")
    )
    texts = [
        f"{cpus:g} CPUs, {memory / 2**30:g} GiB, ${stager_size.dollars_an_hour(cpus, memory):.3f}/h: "
        f"staged {staged[cpus, memory].median:.1f}, durable {durable[cpus, memory].median:.1f}"
        for cpus, memory in sorted(staged)
    ]
    return "reproduced", f"times as long as with 2 CPUs: {'; '.join(texts)}; none ran out of memory"


def _interval_of_its_own(document: Document) -> Judged:
    """Judge the overhead with `every="auto"`, alone on the machine."""
    value = interference.overheads(document, interference.ALONE)
    met = value.median <= _CHECKFREQ_OVERHEAD
    return ("reproduced" if met else "not reproduced"), f'every="auto", alone: {value.text(1, times=100)} %'


RESULTS = (
    PaperResult(
        "ACUTE", "fig. 7", 'makespan delay "nearly zero"', "makespan", _makespan("mlc-base", "beaten")
    ),
    PaperResult("ACUTE", "fig. 7, once an epoch", 'makespan delay "nearly zero"', "epochs", _once_an_epoch),
    PaperResult(
        "ACUTE",
        "fig. 8",
        "43.3 % faster than the multi-level baseline",
        "table",
        _times("done_seconds", "mlc-base", _FASTER_OF_ACUTE),
    ),
    PaperResult(
        "ACUTE",
        "fig. 9",
        "stall below the multi-level baseline's",
        "table",
        _times("stall_seconds", "mlc-base", 1),
    ),
    PaperResult("ACUTE", "fig. 10", "phases of a checkpoint", "table", _phases),
    PaperResult("ACUTE", "fig. 11", f"parallel shards: {_SHARDS_OF_ACUTE} times at best", "shards", _shards),
    PaperResult("ACUTE", "V-E", "contention at the stager's link", "shards", _contention),
    PaperResult(
        "ACUTE", "fig. 12, table 3", "by the stager's size, with prices", "stager-size", _stager_size
    ),
    PaperResult("ACUTE", "fig. 13", "accuracy after restarts", "accuracy", _accuracy),
    PaperResult(
        "ACUTE", "table 2", "ten models, each 43.3 % faster than the baseline", "models", _ten_models
    ),
    PaperResult("LightCheck", "table I", "10 times more often than CheckFreq at 5 %", "makespan", _often),
    PaperResult("LightCheck", "table II, fig. 9", "total time by MTBF", "goodput", _totals),
    PaperResult("LightCheck", "fig. 6", "recovery by tier", "tiered", _recovery),
    PaperResult("LightCheck", "figs. 7, 8", "GPU utilisation and memory", "makespan", _utilisation),
    PaperResult(
        "LightCheck", "figs. 10, 11", "layer-wise pipeline on persistent memory", "tiered", _layer_wise
    ),
    PaperResult("LightCheck", "fig. 15", "accuracy over time with interruptions", "accuracy", _accuracy),
    PaperResult("CheckFreq", "abstract", "overhead within 3.5 %", "interference", _interval_of_its_own),
    PaperResult(
        "CheckFreq",
        "abstract, recovery",
        "a kill loses seconds, not half an epoch",
        "epochs",
        _seconds_not_epochs,
    ),
    PaperResult(
        "CheckFreq", "policy", "a rate that adapts to another job costs less", "interference", _adaptive
    ),
    PaperResult(
        "CheckFreq",
        "profile table",
        "load, compute and copy times of a device",
        "",
        _not_here(
            "every run logs iteration, update and copy times (docs/interval.md), no loading and no device's own times"
        ),
    ),
    PaperResult("PCcheck", "abstract", "about 3 % at every 10 iterations", "makespan", _three_percent),
    PaperResult("PCcheck", "figs. 1, 2, 9", "goodput on a spot trace, up to 2.86 times", "goodput", _model),
    PaperResult("PCcheck", "fig. 8", "throughput by interval", "workloads", _throughput),
    PaperResult(
        "PCcheck",
        "fig. 8, OPT-2.7B, BLOOM-7B",
        "the same on several machines",
        "",
        _not_here("several machines with GPUs"),
    ),
    PaperResult("PCcheck", "fig. 11", "one checkpoint by its size", "models", _sizes),
    PaperResult("PCcheck", "figs. 8, 11, GPM and Gemini", "both cost more", "table", _memory_baselines),
    PaperResult("PCcheck", "fig. 12", "less slowdown with N > 1", "flights", _flights),
    PaperResult("PCcheck", "fig. 13", "less slowdown with p > 1 writers", "tiered", _writers),
    PaperResult("PCcheck", "fig. 14", "host memory of m to 2m", "rings", _host_memory),
    PaperResult("PCcheck", "5.2.2", "recovery", "makespan", _kill_costs),
)


def grid(documents: Mapping[str, Document | None]) -> Grid:
    """Return all rows, in the order of the papers."""
    rows = []
    for result in RESULTS:
        document = documents.get(result.experiment)
        if result.experiment and document is None:
            verdict, text = "not measured yet", f'`make bench BENCH="{result.experiment}"`'
        else:
            verdict, text = result.judge(document or {})
        when = (document or {}).get("measured") or (document or {}).get("recorded") or {}
        source = f"{result.experiment} {when.get('date', '')}".strip()
        rows.append((f"{result.paper}, {result.place}", result.claim, verdict, text, source))
    counts = {
        verdict: sum(row[2] == verdict for row in rows) for verdict in dict.fromkeys(row[2] for row in rows)
    }
    title = f"{len(rows)} results: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}"
    return Grid(title, ("result", "what it says", "here", "measured", "by, on"), tuple(rows))


def shortfalls(of: Grid) -> str:
    """Return the first sentence below the table, which names the results that fall short of a paper's, or ""."""
    named = {"not reproduced": "Not reproduced", "in part": "Reproduced in part"}
    found = {verdict: [row[0] for row in of.rows if row[2] == verdict] for verdict in named}
    return " ".join(f"**{named[verdict]}:** {'; '.join(rows)}." for verdict, rows in found.items() if rows)
