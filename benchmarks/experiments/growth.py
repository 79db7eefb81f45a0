"""Growth with ranks, chunks, tensors and checkpoints: CPU seconds, bytes and counts of the parts that grow.

Runs real parts of holdfast without a large cluster: ranks, transport or store are simulated (benchmarks/growing), so
the figures count only what holdfast itself computes and keeps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.experiments import EXPERIMENTS, Options, command_of
from benchmarks.grid import Grid
from benchmarks.growing.agreeing import STATES, agree
from benchmarks.growing.cataloguing import catalogue
from benchmarks.growing.connections import SINKS, connections
from benchmarks.growing.frames import stager_per_frame
from benchmarks.growing.preparing import prepare

__all__ = ["grids", "measure"]

_RANKS = (2, 64, 512)
_FRAMES, _RING_CHUNKS = 8192, 4096
_IMAGE_CHUNKS = 65_566
_TENSORS = 10_000
_CHECKPOINTS, _NAMED_TENSORS = 10_000, 1_500
_SECONDS_EACH_WAY = 30


def measure(options: Options) -> dict[str, Any]:
    ranks = _RANKS[: options.count(len(_RANKS), 2)]
    most = ranks[-1]
    options.progress("frames at the stager")
    frames = [stager_per_frame(of, options.count(_FRAMES, 256), _RING_CHUNKS) for of in ranks]
    options.progress("prepare")
    prepared = prepare(most, options.count(_IMAGE_CHUNKS, 1024))
    agreed = {}
    for state in STATES:
        options.progress(f"agreement, {state}")
        agreed[state] = agree(state, most, options.count(_TENSORS, 100))
    options.progress("catalog")
    checkpoints = options.count(_CHECKPOINTS, 50)
    looks = catalogue(checkpoints, _NAMED_TENSORS)
    sinks = {}
    for name, speed in SINKS.items():
        options.progress(f"connections, {name}")
        sinks[name] = connections(speed, options.count(_SECONDS_EACH_WAY, 2))
    return {
        "experiment": "growth",
        "what": EXPERIMENTS["growth"],
        "command": command_of("growth", options),
        "quick": options.quick,
        "machine": machine.describe(options.folder or Path("/tmp")),
        "measured": machine.measured(),
        "shape": {"model": "played", "ranks": most, "image_chunks": _IMAGE_CHUNKS, "tensors": _TENSORS},
        "frames": frames,
        "prepare": prepared,
        "agreement": agreed,
        "catalog": {"checkpoints": checkpoints, "looks": looks},
        "connections": sinks,
    }


def grids(document: dict[str, Any]) -> list[Grid]:
    frames, least = document["frames"], document["frames"][0]["frame_seconds"]
    return [
        Grid(
            "The stager's Python per frame, by number of ranks",
            ("ranks", "frames", "ms per frame", "times 2 ranks", "all offers, ms", "all done, ms"),
            tuple(
                (
                    str(of["ranks"]),
                    str(of["frames"]),
                    f"{of['frame_seconds'] * 1e3:.3f}",
                    f"{of['frame_seconds'] / least:.2f}",
                    f"{of['begin_seconds'] * 1e3:.1f}",
                    f"{of['end_seconds'] * 1e3:.1f}",
                )
                for of in frames
            ),
        ),
        Grid(
            f"Preparing a checkpoint of {document['shape']['ranks']} ranks, CPU seconds",
            ("image", "first of a layout", "each next one"),
            tuple(
                (name, f"{of['first_seconds']:.3f}", f"{of['next_seconds']:.4f}")
                for name, of in document["prepare"].items()
            ),
        ),
        Grid(
            f"Agreement of {document['shape']['ranks']} ranks on {document['shape']['tensors']} tensors, at the stager",
            ("state", "CPU seconds", "received, MB", "kept, MB"),
            tuple(
                (
                    name,
                    f"{of['seconds']:.2f}",
                    f"{of['received_bytes'] / 1e6:.1f}",
                    f"{of['kept_bytes'] / 1e6:.1f}",
                )
                for name, of in document["agreement"].items()
            ),
        ),
        Grid(
            f"A catalog of {document['catalog']['checkpoints']} checkpoints in a directory",
            ("look", "CPU seconds", "most resident, MB", "JSON files opened"),
            tuple(
                (
                    name,
                    f"{of['seconds']:.2f}",
                    f"{of['resident_bytes'] / 1e6:.0f}",
                    str(of["files_opened"]),
                )
                for name, of in document["catalog"]["looks"].items()
            ),
        ),
        Grid(
            "Bytes to and from an S3 server that limits each connection, or all",
            ("server", "way", "MB/s", "of what it lets pass", "connections", "CPU s/GB"),
            tuple(
                (
                    sink,
                    way,
                    f"{of['bytes_per_second'] / 1e6:.0f}",
                    f"{of['bytes_per_second'] / of['most_bytes_per_second']:.0%}",
                    f"{of['connections']:.0f}",
                    f"{of['cpu_seconds_per_gb']:.2f}",
                )
                for sink, ways in document["connections"].items()
                for way, of in ways.items()
            ),
        ),
    ]
