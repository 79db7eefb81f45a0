"""The machine's own limits, worded for the table of targets and computed from the documents alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.experiments import s3
from benchmarks.experiments.makespan import overheads
from benchmarks.experiments.restore import RAW
from benchmarks.experiments.table import ratio
from benchmarks.spread import columns, ratios, spread

__all__ = [
    "Document",
    "Documents",
    "bare_is",
    "bare_save",
    "bare_share",
    "gate_limit",
    "pipeline",
    "raw_ranges",
    "raw_read",
    "server_share",
]

Document = Mapping[str, Any]
Documents = Mapping[str, Document | None]

_DONE = "done_seconds"
_PIPELINE = "raw_pipeline"
_BARE = ((_PIPELINE, "a bare pipeline"), ("raw_over", "a raw write alone"))


def bare_is(*peers: str) -> Callable[[Documents], str]:
    """How many times faster than a peer the bare pipeline and a bare write are."""

    def limit(documents: Documents) -> str:
        table = documents.get("table")
        texts = []
        for bare, what in _BARE:
            values = [ratio(table["rounds"], (peer, _DONE), (bare, _DONE)) for peer in peers] if table else []
            found = [value for value in values if value is not None]
            if found:
                texts.append(f"{what} is {min(found, key=lambda value: value.median).text(1)} times faster")
        return "; ".join(texts)

    return limit


def pipeline(figure: str, alone: str) -> Callable[[Documents], str]:
    """The bare pipeline's bandwidth, as a share of that of a transfer or write alone."""

    def limit(documents: Documents) -> str:
        table = documents.get("table")
        value = ratio(table["rounds"], (alone, _DONE), (_PIPELINE, figure)) if table else None
        return f"bare copy, MPI and write in one pipeline: {value.text(0, times=100)} %" if value else ""

    return limit


def gate_limit(documents: Documents) -> str:
    """Number of settings in which the copy takes longer than computation and update together."""
    document = documents.get("gate")
    if not document:
        return ""
    cells = document["cells"]
    outlasted = 0
    for of in cells:
        copies = spread([figures["layer-wise"]["copy_seconds"] for figures in of["rounds"]]).median
        outlasted += copies > of["compute_seconds"] + of["update_seconds"]
    return f"in {outlasted} of {len(cells)} the copy outlasts computation and update: no gate hides that"


def server_share(documents: Documents) -> str:
    """CPU seconds of the S3 server for the same bytes: every client waits for these."""
    document = documents.get("s3")
    cpu = columns(document["rounds"], s3.RAW, "server_cpu_seconds") if document else []
    if not document or not cpu:
        return ""
    bare = spread(columns(document["rounds"], s3.RAW, _DONE)).median
    return f"the server computes {spread(cpu).median:.1f} s for a bare upload, which takes {bare:.1f} s on two cores"


def raw_ranges(documents: Documents) -> str:
    document = documents.get("s3")
    rounds = document["restores"] if document else []
    theirs, bare = (columns(rounds, how, "seconds") for how in ("s3torchconnector", s3.RAW_READ))
    return (
        f"bare ranged reads alone are {ratios(theirs, bare).text(1)} times faster" if theirs and bare else ""
    )


def bare_share(every: int) -> Callable[[Documents], str]:
    """Seconds between two checkpoints, beside those of bare transfers of the same bytes."""

    def limit(documents: Documents) -> str:
        table, makespan = documents.get("table"), documents.get("makespan")
        if not table or not makespan:
            return ""
        between = every * makespan["iteration_seconds"]
        return "; ".join([f"{between:.1f} s are between two", *_bare_takes(table)])

    return limit


def _bare_takes(table: Document) -> list[str]:
    """Seconds of bare transfers of the same bytes."""
    found = ((what, columns(table["rounds"], bare, _DONE)) for bare, what in _BARE)
    return [f"{what} takes {spread(seconds).median:.2f} s" for what, seconds in found if seconds]


def bare_save(model: str, every: int) -> Callable[[Documents], str]:
    """Overhead of a peer that only copies and writes, in the same training."""

    def limit(documents: Documents) -> str:
        document = documents.get("workloads")
        runs = [run for run in document["runs"] if run["model"] == model] if document else []
        bare = overheads(runs, "pccheck-like", every)
        if not document or bare is None:
            return ""
        return f"with the bare copy and write of pccheck-like: {bare.text(1, times=100)} %"

    return limit


def raw_read(documents: Documents) -> str:
    document = documents.get("restore")
    raw = columns(document["rounds"], RAW, "seconds") if document else []
    if not raw or not document:
        return ""
    theirs = columns(document["rounds"], "torch.load", "seconds")
    return f"a raw read alone is {ratios(theirs, raw).text(1)} times faster"
