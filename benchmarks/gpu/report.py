"""The figures of a run beside their targets, from its JSON alone: for the terminal, OUT/report.md and docs/gpu.md.

Reads what `make gpu` writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Figure", "GpuRun", "figures", "machine", "markdown", "peers_table", "write_report"]

_HOLDFAST = "holdfast"
# Targets. The stall: 1.2 copies on the device at an H100's rate, where each byte is read and written.
_STALL_MS_PER_GB_MAX = 0.82
_CALL_MS_MAX, _CALL_MS_PER_TENSOR_MAX = 3.0, 1.5e-3
_SMALL_CALL_MS_MAX = 15.0
_OF_PINNED_MIN = {"small_mirror": 0.7, "small_gate": 0.5, "large_mirror": 0.9, "large_gate": 0.9}
_KEPT_COPIES_MAX, _RESTORE_COPIES_MAX = 1.3, 2.0
_FIRST_USE_SECONDS_MAX = 3.0
_P99_RATIO_MAX = 1.02
_GIVEN_MIN = 0.98
_STRATEGIES = {
    "default": "default",
    "slot_mirror": "mirror, slot",
    "slot_gate": "gate, slot",
    "area_mirror": "mirror, area",
    "area_gate": "gate, area",
}
_PEERS = {
    "lmr": "lm-resiliency",
    "lm_resiliency": "lm-resiliency",
    "lmr_waited": "lm-resiliency, with its own wait",
    "dcp": "DCP `async_save`, pinned",
    "tc": "torch_checkpointing",
    "torch_checkpointing": "torch_checkpointing",
    "torch_save": "`torch.save`",
}


@dataclass(frozen=True)
class Figure:
    """One line of the report; without a measurement or a target, `met` has the value None."""

    figure: str
    wanted: str
    measured: str
    met: bool | None


class GpuRun:
    """The documents of a run.

    Attributes:
        ways: Ways of holdfast and its peers, at each size.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.phases: dict[str, dict[str, Any]] = {}
        self.ways: list[dict[str, Any]] = []
        for path in sorted(folder.glob("*.json")):
            document = json.loads(path.read_text(encoding="utf-8"))
            self.phases[path.stem] = document
            ways = document.get("figures", {}).get("ways") or ()
            self.ways += [way for way in ways if isinstance(way, dict) and "state_bytes" in way]
        self.on: dict[str, Any] = self.phases.get("facts", {}).get("on") or {}

    def of(self, phase: str) -> dict[str, Any]:
        """Return the figures of a phase, empty if there are none."""
        found: dict[str, Any] = self.phases.get(phase, {}).get("figures", {})
        return found

    @property
    def rates(self) -> dict[str, float]:
        """Rates of bare copies in GB/s."""
        found: dict[str, float] = self.of("bandwidths").get("bare_gb_per_second") or {}
        return found or self.of("stall").get("bare_gb_per_second") or {}

    def by_holdfast(self) -> dict[str, dict[str, Any]]:
        """Ways of holdfast, the large state first."""
        found = {way["size"]: way for way in self.ways if way["way"] == _HOLDFAST and "call_ms" in way}
        return {size: found[size] for size in ("large", "small") if size in found}


def figures(run: GpuRun) -> list[Figure]:
    """Return all lines of the report."""
    return [
        *_of_saves(run),
        *_of_waits(run),
        *_of_lanes(run),
        *_of_steps(run),
        *_beside_peers(run),
        *_of_bits(run),
    ]


def _of_saves(run: GpuRun) -> Iterable[Figure]:
    sizes = run.by_holdfast()
    if not sizes:
        yield Figure("stall and `save()`", f"at most {_STALL_MS_PER_GB_MAX} ms/GB", "not measured", None)
    rates = run.rates
    for way in sizes.values():
        gb = f"{way['state_bytes'] / 1e9:.1f} GB"
        for name, key in (("device idle", "stall"), ("queue busy", "stall_queued")):
            stall = way.get(f"{key}_ms_per_gb")
            yield _at_most(f"stall of {gb}, {name}, ms/GB", _STALL_MS_PER_GB_MAX, stall, 2)
        most = _CALL_MS_MAX + _CALL_MS_PER_TENSOR_MAX * way.get("tensors", 0)
        for name, key in (("device idle", "call_ms"), ("queue busy", "call_queued_ms")):
            yield _at_most(
                f"`save()` of {gb}, {way.get('tensors')} tensors, {name}, ms", most, way.get(key), 1
            )
    for way in sizes.values():
        gb = way["state_bytes"] / 1e9
        kept, back = way.get("copy_seconds"), way.get("read_back_seconds")
        copies = kept * rates["pinned"] / gb if kept and "pinned" in rates else None
        yield _at_most(f"{gb:.1f} GB kept, in bare copies", _KEPT_COPIES_MAX, copies, 1)
        to_device = rates.get("to_device", rates.get("pinned"))
        copies = back * to_device / gb if back and to_device else None
        yield _at_most(f"{gb:.1f} GB restored to the device, in bare copies", _RESTORE_COPIES_MAX, copies, 1)
        if way.get("stall_ms") is not None and way.get("device_copy_ms"):
            told = ", ".join(
                f"{way[key] / way['device_copy_ms']:.1f}"
                for key in ("stall_ms", "stall_queued_ms")
                if way.get(key) is not None
            )
            told += f" of {way['device_copy_ms']:.1f} ms each"
            yield Figure(f"stall of {gb:.1f} GB, idle and busy, in copies on the device", "", told, None)
    yield from _of_many(run)
    large = sizes.get("large", {})
    host_gb = large.get("host_gb") or large.get("host_bytes", 0) / 1e9
    name = f"first use: {host_gb:.0f} GB made, locked and used, s" if host_gb else "first use of 24 GB, s"
    yield _at_most(name, _FIRST_USE_SECONDS_MAX, large.get("open_seconds"), 1)


def _of_many(run: GpuRun) -> Iterable[Figure]:
    many = run.of("waits").get("many")
    if not many:
        return
    what = f"{many['state_bytes'] / 1e9:.1f} GB, {many['tensors']:,} tensors"
    most = _CALL_MS_MAX + _CALL_MS_PER_TENSOR_MAX * many["tensors"]
    # The device is idle during the call, so the call is a part of the stall.
    stall = most + _STALL_MS_PER_GB_MAX * many["state_bytes"] / 1e9
    for name, queued in (("device idle", ""), ("queue busy", "_queued")):
        yield _at_most(f"`save()` of {what}, {name}, ms", most, many.get(f"call{queued}_ms"), 1)
        yield _at_most(f"stall of {what}, {name}, ms", stall, many.get(f"stall{queued}_ms"), 1)


def _of_waits(run: GpuRun) -> Iterable[Figure]:
    strategies = run.of("waits").get("strategies") or {}
    waits = {name: of["waited_for_the_queue"] for name, of in strategies.items()}
    said = ", ".join(
        f"{_STRATEGIES.get(name, name)}: {'yes' if one else 'no'}" for name, one in waits.items()
    )
    yield Figure(
        "`save()` waits for queued work",
        "never",
        said or "not measured",
        not any(waits.values()) if waits else None,
    )
    mapped = {name: of["mapped_bytes"] for name, of in strategies.items() if "mapped_bytes" in of}
    if mapped:
        said = ", ".join(f"{_STRATEGIES.get(name, name)}: {one:,}" for name, one in mapped.items())
        yield Figure("bytes mapped in a fourth save", "0", said, not any(mapped.values()))
    memory = run.of("bandwidths").get("mirror_memory")
    if memory:
        said = f"{memory['take_ms_per_gb']:.2f} and {memory['give_back_ms_per_gb']:.2f} ms/GB"
        yield Figure("memory of a mirror from the device, taken and given back", "", said, None)


def _of_lanes(run: GpuRun) -> Iterable[Figure]:
    for name, lane in (run.of("bandwidths").get("lane") or {}).items():
        what = f"{lane['tensors']:,} tensors of {lane['bytes'] / lane['tensors'] / 1e6:.1f} MB, {name.split('_')[1]}"
        measured = f"{100 * lane['of_bare_pinned']:.0f} % ({lane['gb_per_second']:.1f} GB/s)"
        least = _OF_PINNED_MIN[name]
        yield Figure(
            f"{what}: rate of the lane",
            f"at least {100 * least:.0f} % of a bare copy",
            measured,
            lane["of_bare_pinned"] >= least,
        )
        if name.startswith("small"):
            yield _at_most(f"{what}: `save()`, ms", _SMALL_CALL_MS_MAX, lane["save_call_ms"], 1)


def _of_steps(run: GpuRun) -> Iterable[Figure]:
    steps = run.of("steps")
    every = steps.get("every", 10)
    name = f"p99 of step times, a save every {every} steps, against without"
    yield _at_most(name, _P99_RATIO_MAX, steps.get("p99_ratio"), 2)
    memory = run.of("memory")
    if memory.get("asked_and_given_bytes"):
        share = memory["asked_and_given_bytes"] / memory["free_bytes"]
        yield Figure(
            "a training that asks for all free device memory is given",
            f"at least {100 * _GIVEN_MIN:.0f} %",
            f"{100 * share:.1f} % of {memory['free_bytes'] / 1e9:.1f} GB",
            share >= _GIVEN_MIN,
        )


def _beside_peers(run: GpuRun) -> Iterable[Figure]:
    for size, mine in run.by_holdfast().items():
        for way in run.ways:
            if way["size"] != size or way["way"] not in _PEERS or way.get("stall_ms") is None:
                continue
            told = f"{mine['stall_ms']:.0f} ms, the peer {way['stall_ms']:.0f} ms"
            name = f"stall of {way['state_bytes'] / 1e9:.1f} GB beside {_PEERS[way['way']]}"
            yield Figure(name, "less", told, mine["stall_ms"] < way["stall_ms"])


def _of_bits(run: GpuRun) -> Iterable[Figure]:
    for way in run.by_holdfast().values():
        told = str(way.get("consistent", "not looked at"))
        name = f"{way['state_bytes'] / 1e9:.1f} GB restored, compared with clones of the moment of `save()`"
        yield Figure(name, "the same bits", told, told == "yes")
    for name, of in (run.of("exact").get("patterns") or {}).items():
        told = f"{of.get('exact', 0)} of {of.get('saves', '?')} files" if "error" not in of else "failed"
        right = of.get("exact") == of.get("saves") is not None
        yield Figure(f"published files, {name.replace('_', ' ')}", "all exact", told, right)
    for kind, of in (run.of("jobs").get("jobs") or {}).items():
        told = f"{of.get('ranks')} ranks, {of.get('backend')}: {'same bits' if of.get('same_bits') else 'not the same'}"
        yield Figure(f"killed and resumed, {kind}", "same bits", told, bool(of.get("same_bits")))
    tests = run.of("tests")
    if tests:
        failed = len(tests["failed"])
        yield Figure("tests/gpu", "all pass", f"{tests['passed']} passed, {failed} failed", not failed)


def _at_most(figure: str, most: float, measured: float | None, digits: int) -> Figure:
    wanted = f"at most {most:.{digits}f}"
    if measured is None:
        return Figure(figure, wanted, "not measured", None)
    return Figure(figure, wanted, f"{measured:.{digits}f}", measured <= most)


def markdown(lines: Sequence[Figure]) -> str:
    """Return the lines as a Markdown table."""
    head = ["| figure | wanted | measured | met |", "|---|---|---|---|"]
    met = {True: "yes", False: "**no**", None: "–"}
    return "\n".join(
        [*head, *(f"| {one.figure} | {one.wanted} | {one.measured} | {met[one.met]} |" for one in lines)]
    )


def peers_table(run: GpuRun) -> str:
    """Return the table of holdfast and each peer: call, stall, copy, memory, and whether the copy is correct."""
    head = (
        "| | state, GB | call, ms | stall, ms | stall with a busy queue, ms | a window without a save, ms | kept, s |"
        " host memory, GB | first use, s | consistent |"
    )
    rows = [head, "|---" * 10 + "|"]
    names = {_HOLDFAST: "**holdfast**", **_PEERS}
    for size in ("small", "large"):
        for way in run.ways:
            if way["size"] != size or way["way"] not in names or way.get("stall_ms") is None:
                continue
            host = way.get("host_gb", (way.get("host_bytes") or 0) / 1e9)
            spread = f" ± {way['none_spread_ms'] / 2:.0f}" if way.get("none_spread_ms") else ""
            cells = [
                names[way["way"]],
                f"{way['state_bytes'] / 1e9:.1f}",
                *(_cell(way.get(key), 0) for key in ("call_ms", "stall_ms", "stall_queued_ms")),
                f"{_cell(way.get('none_ms'), 0)}{spread}",
                _cell(way.get("copy_seconds"), 2),
                _cell(host or None, 1),
                _cell(way.get("open_seconds") or None, 1),
                str(way.get("consistent")),
            ]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _cell(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def machine(run: GpuRun) -> str:
    """Return a description of the machine."""
    on = run.on
    return f"{on.get('card')}, driver {on.get('driver')}, torch {on.get('torch')}, commit {on.get('commit')}"


def write_report(out: Path) -> None:
    """Write OUT/report.md, and print it."""
    run = GpuRun(out)
    lines = figures(run)
    missed = sum(one.met is False for one in lines)
    unknown = sum(one.met is None for one in lines)
    ended = [f"{name}: {of.get('status')}" for name, of in run.phases.items() if of.get("status") != "done"]
    said = [
        machine(run),
        "",
        markdown(lines),
        "",
        peers_table(run),
        "",
        f"{missed} figures miss their target, and {unknown} have none or were not measured.",
        *([f"Not whole: {'; '.join(ended)}."] if ended else []),
    ]
    text = "\n".join(said) + "\n"
    (out / "report.md").write_text(text, encoding="utf-8")
    print(text, flush=True)
