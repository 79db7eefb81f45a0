"""Fills in the tables of docs/scaling.md, computed by scale.py and message_load.py: `python -m benchmarks.on_paper`.

<!-- computed: load -->    messages, chunks and bytes of one checkpoint, by ranks and size
<!-- computed: split -->   the same for a state that is split among the ranks, from the layout itself
<!-- computed: stagers --> number of stagers for a terabyte, by machine and minutes between checkpoints
<!-- computed: intervals --> number of stagers for 1.1 TB of 512 ranks, by one stager's constants, and their prices
<!-- computed: constants --> one stager's measured constants, with their sources
<!-- computed: rings -->   time to stage a terabyte into rings of several sizes
<!-- computed: against --> the same rules beside measured figures from docs/figures/data
<!-- computed: machines --> the machines, and the sources of their figures
… <!-- end -->
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import results
from benchmarks.experiments import shares, transport
from benchmarks.grid import Grid
from benchmarks.large_model import RANKS, agreed, layout_of
from benchmarks.message_load import MessageLoad
from benchmarks.spread import Spread, spread
from benchmarks.stagers_by_interval import StagerLimits, stagers_by_interval
from holdfast.image.layout import Layout
from holdfast.image.shares import WRITERS_MAX
from holdfast.image.slices import frames_of
from operator_side.simulate.scale import (
    STAGERS,
    STAGERS_SOURCE,
    Shape,
    best_ring,
    staged_seconds,
    stagers_needed,
)

__all__ = ["PAGE", "filled", "main"]

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
_MARKED = re.compile(r"(<!-- computed: (?P<what>[a-z]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_TERABYTE = 10**12
_GIB = 1 << 30
_SHAPES = (
    ("GPT-2 small, AdamW", 2, 1_490_000_000),
    ("7 B parameters, AdamW", 64, 84_000_000_000),
    ("7 B parameters, AdamW", 1024, 84_000_000_000),
)
_MINUTES = (1, 2, 5, 10, 30)
_STORE_RATES = (float("inf"), 5e9)
_RINGS_GIB = (1, 16, 100)
_LARGE_BYTES = 1_100_000_000_000
_INTERVALS = {"30 s": 30, "1 min": 60, "2 min": 120, "5 min": 300, "10 min": 600}
# With 2 ranks; a frame costs the session the same with 512 ranks.
_FRAME_SECONDS, _FRAME_SOURCE = 0.12e-3, "measured at 1f3d5c6"
_CONNECTIONS = 128  # largest value of the setting `writers`
_CONNECTION_RATE = 100e6
_DOLLARS = {
    "c7gn.4xlarge": 0.9984,
    "c7gn.8xlarge": 1.9968,
    "c7gn.12xlarge": 2.9952,
    "c7gn.16xlarge": 3.9936,
}
_DOLLARS_SOURCE = (
    "on demand in us-east-1; SkyPilot's catalog (catalogs/v8/aws/vms.csv at 00148f2a), read 2026-11-28"
)


def filled(text: str) -> str:
    """Return the page with the text between markers computed again.

    Raises:
        ValueError: A marker names no table.
    """

    def fill_in(match: re.Match[str]) -> str:
        if match["what"] not in _TABLES:
            raise ValueError(f"the page asks for {match['what']!r}; there are {', '.join(_TABLES)}")
        return f"{match[1]}{_TABLES[match['what']]().markdown()}\n{match[3]}"

    return _MARKED.sub(fill_in, text)


def main() -> None:
    """Fill the page in place."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"written: {PAGE}")


def _load() -> Grid:
    rows = []
    for name, ranks, image_bytes in _SHAPES:
        load = MessageLoad.of(Shape(ranks, image_bytes))
        rows.append(
            (
                f"{name}, {ranks:,} ranks",
                _size(image_bytes),
                _size(load.slice_bytes),
                f"{load.chunks:,}",
                f"{load.frames_max:,}",
                f"{load.control_messages_max:,}",
                f"{load.journal_writes:,}",
                _size(load.part_bytes_min),
            )
        )
    names = (
        "job",
        "image",
        "a rank's slice, and area",
        "chunks",
        "frames, at most",
        "control messages, at most",
        "journal writes",
        "least part in S3",
    )
    return Grid("One checkpoint, in chunks of 16 MiB", names, tuple(rows))


@functools.cache
def _large() -> tuple[Layout, list[int]]:
    """Return the image of the model of 70 B parameters, and the number of frames for each chunk."""
    layout = layout_of(agreed()[1])
    return layout, [len(layout.senders(chunk)) for chunk in range(layout.chunks)]


@functools.cache
def _split() -> Grid:
    layout, in_chunks = _large()
    sent = sum(extent.nbytes for frame in frames_of(layout, 0) for extent in frame.extents)
    row = (
        f"70 B parameters, AdamW, {RANKS} ranks",
        _size(layout.image_bytes),
        _size(sent),
        f"{layout.chunks:,}",
        f"{sum(in_chunks):,}",
        f"{max(in_chunks):,}",
        f"{MessageLoad.control_messages(RANKS, sum(in_chunks)):,}",
    )
    names = (
        "job",
        "image",
        "rank 0's slice",
        "chunks",
        "frames",
        "most of them in one chunk",
        "control messages, at most",
    )
    return Grid(
        "One checkpoint of split state: FSDP over 64, each with tensor parallelism of 8", names, (row,)
    )


def _stagers() -> Grid:
    rows = []
    for store_rate in _STORE_RATES:
        for one in STAGERS:
            needed = [stagers_needed(_TERABYTE, 60 * minutes, one, store_rate) for minutes in _MINUTES]
            soonest = _TERABYTE / min(one.rate, store_rate)
            store = "" if store_rate == float("inf") else f", {_size(store_rate)}/s into the store"
            rows.append((f"{one.name}{store}", f"{soonest:.0f} s", *map(str, needed)))
    names = ("stager", "one every, at best", *(f"every {minutes} min" for minutes in _MINUTES))
    return Grid("How many of them take 1 TB, by the time between two checkpoints", names, tuple(rows))


class _Constants(NamedTuple):
    """One stager's constants; beside each value its source."""

    receiving_seconds: tuple[float, str]  # for a byte
    frame_seconds: tuple[float, str]
    frame_bytes: float
    commit_seconds: tuple[float, str]

    @classmethod
    def measured(cls) -> _Constants:
        tcp, growth, shared = (results.read(name) for name in ("transport", "growth", "shares"))
        assert tcp is not None, "docs/figures/data has it"
        per_byte = [of[transport.TCP]["cpu_seconds"] / of[transport.TCP]["nbytes"] for of in tcp["rounds"]]
        frame_seconds = (_FRAME_SECONDS, _FRAME_SOURCE)
        if growth is not None:
            frame_seconds = (growth["frames"][-1]["frame_seconds"], _source(growth))
        commit_seconds = (0.0, "not measured yet: `python -m benchmarks shares`")
        if shared is not None:
            commit_seconds = (shares.beyond_bytes(shared), _source(shared))
        layout, in_chunks = _large()
        return cls(
            (spread(per_byte).median, _source(tcp)),
            frame_seconds,
            layout.image_bytes / sum(in_chunks),
            commit_seconds,
        )

    def limits(self, card_rate: float) -> StagerLimits:
        return StagerLimits(
            card_rate,
            self.receiving_seconds[0],
            self.frame_seconds[0],
            self.frame_bytes,
            _CONNECTIONS,
            _CONNECTION_RATE,
        )


def _source(document: dict[str, Any]) -> str:
    of = document.get("measured") or document["recorded"]
    return f"`{document['command']}`, {of['date']}, {of['commit']}"


def _intervals() -> Grid:
    constants, rows = _Constants.measured(), []
    for one in STAGERS:
        limits, cells = constants.limits(one.rate), []
        for seconds in _INTERVALS.values():
            needed = stagers_by_interval(_LARGE_BYTES, seconds, limits, constants.commit_seconds[0])
            price = "" if needed is None else f": ${needed * _DOLLARS[one.name]:.2f}"
            cells.append(f"{needed or f'over {WRITERS_MAX}'}{price}")
        rows.append((one.name, f"{_size(limits.rate)}/s", limits.slowest, *cells))
    names = ("stager", "one takes", "its limit", *(f"every {name}" for name in _INTERVALS))
    title = f"{_size(_LARGE_BYTES)} on {RANKS} ranks: stagers, and US dollars per hour for all of them"
    return Grid(title, names, tuple(rows))


def _constants() -> Grid:
    of = _Constants.measured()
    rows = (
        (
            "stager's thread, receiving over TCP",
            f"{of.receiving_seconds[0] * 1e9:.3f} CPU s/GB",
            of.receiving_seconds[1],
        ),
        ("stager's thread, per frame", f"{of.frame_seconds[0] * 1e3:.3f} ms", of.frame_seconds[1]),
        ("a frame", _size(of.frame_bytes), "computed: the layout of the 70 B parameters above"),
        (
            "connections to S3",
            f"{_CONNECTIONS} of {_size(_CONNECTION_RATE)}/s",
            "the most that `writers` admits; speed assumed",
        ),
        ("commit, beyond the bytes", f"{of.commit_seconds[0]:.2f} s", of.commit_seconds[1]),
        ("prices", "see above", _DOLLARS_SOURCE),
    )
    return Grid("The constants", ("what", "value", "source"), rows)


def _rings() -> Grid:
    one = STAGERS[-1]
    store_rate = _STORE_RATES[-1]
    rows = []
    for gib in _RINGS_GIB:
        seconds = staged_seconds(_TERABYTE, gib * _GIB, one.rate, store_rate)
        rows.append((f"{gib} GiB", f"{seconds:.0f}", f"{_TERABYTE / store_rate:.0f}"))
    most = best_ring(
        Shape(1024, _TERABYTE), in_rate=one.rate, out_rate=store_rate, memory_bytes=one.memory_bytes
    )
    journal = f"{most.journal_bytes / (1 << 20):.0f} MiB"
    rows.append(
        (
            f"{most.ring_bytes / _GIB:.1f} GiB, all that it has room for (journal: {journal})",
            f"{most.staged_seconds:.0f}",
            f"{_TERABYTE / store_rate:.0f}",
        )
    )
    title = f"1 TB into {one.name} and on at {_size(store_rate)}/s"
    return Grid(title, ("ring", "staged after, s", "durable after, s"), tuple(rows))


def _against() -> Grid:
    """Compare counts and bytes of `MessageLoad`, and seconds of `staged_seconds` at the largest ring's rates."""
    scaling, slices, rings = (_measured(name) for name in ("scaling", "slices", "rings"))
    rows = []
    for cell in scaling["cells"]:
        load = MessageLoad.of(Shape(cell["ranks"], cell["image_bytes"], scaling["shape"]["chunk_bytes"]))
        what = f"chunks: {cell['ranks']} ranks, {cell['tensors']:,} tensors, {_size(cell['image_bytes'])}"
        rows.append((what, f"{load.chunks}", f"{cell['chunks']}", _ratio(cell["chunks"], load.chunks)))
    for cell in slices["cells"]:
        load = MessageLoad.of(Shape(cell["ranks"], slices["image_bytes"]))
        what = f"the largest slice: {cell['ranks']} ranks, {_size(slices['image_bytes'])}"
        taken = cell["slice_bytes"]
        rows.append((what, _size(load.slice_bytes), _size(taken), _ratio(taken, load.slice_bytes)))
    image_bytes = rings["image_bytes"]
    *smaller, largest = rings["cells"]
    in_rate, out_rate = (
        image_bytes / _seconds(largest, of).median for of in ("staged_seconds", "done_seconds")
    )
    for cell in smaller:
        predicted = staged_seconds(image_bytes, cell["ring_bytes"], in_rate, out_rate)
        found = _seconds(cell, "staged_seconds")
        what = f"staged: {_size(image_bytes)} through a ring of {cell['ring_bytes'] >> 20} MiB"
        rows.append((what, f"{predicted:.3f} s", f"{found.text(3)} s", _ratio(found.median, predicted)))
    return Grid(
        "Two cores; measured with 1 to 32 ranks", ("what", "predicted", "measured", "ratio"), tuple(rows)
    )


def _measured(experiment: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((PAGE.parent / "figures" / "data" / f"{experiment}.json").read_text())
    return found


def _seconds(cell: dict[str, Any], of: str) -> Spread:
    return spread([one[of] for one in cell["rounds"]])


def _ratio(found: float, predicted: float) -> str:
    return f"{found / predicted:.2f}"


def _machines() -> Grid:
    rows = [
        (one.name, f"{one.gigabits} Gbit/s, {_size(one.rate)}/s", f"{one.memory_bytes // _GIB} GiB")
        for one in STAGERS
    ]
    return Grid(f"Source: {STAGERS_SOURCE}", ("type", "network, each way", "memory"), tuple(rows))


def _size(nbytes: float) -> str:
    for unit, least in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if nbytes >= least:
            return f"{nbytes / least:.3g} {unit}"
    return f"{nbytes / 1e3:.3g} kB"


_TABLES: dict[str, Callable[[], Grid]] = {
    "load": _load,
    "split": _split,
    "stagers": _stagers,
    "intervals": _intervals,
    "constants": _constants,
    "rings": _rings,
    "against": _against,
    "machines": _machines,
}


if __name__ == "__main__":
    main()
