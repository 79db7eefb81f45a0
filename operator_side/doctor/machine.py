"""Checks of the machine: Python, memory for the ring, open files, clock, network."""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from holdfast import __version__
from holdfast.command.checks import CheckPlan, CheckState, Finding
from holdfast.errors import ConfigError
from holdfast.process import available_memory_bytes
from holdfast.ring.directory import make_private_directory
from holdfast.ring.growth import growth_bytes_in, image_chunks_max
from holdfast.store.file_system import IN_MEMORY, file_system_of

_DESCRIPTORS_MIN = 1024
_TOUCH_BYTES = 64 << 20
_CLOCK_SECONDS = 0.2
_CLOCK_SLACK_SECONDS = 0.05
_CLOCK_READINGS = 10
_SLOW_MBITS = 10_000
_MIB = 1 << 20


def python(_: CheckPlan) -> Iterator[Finding]:
    system = f"{platform.system()} {platform.release()}"
    seen = f"holdfast {__version__}, Python {platform.python_version()}, {system}"
    yield Finding("python", CheckState.OK, seen)  # holdfast cannot be imported by an older Python
    cores = len(os.sched_getaffinity(0))
    yield Finding.from_condition(
        "cores",
        cores >= 2,
        f"{cores} usable cores",
        "use a machine with two or more cores: on one, stager and flusher wait for each other",
        CheckState.WARN,
    )


def shared_memory(plan: CheckPlan) -> Iterator[Finding]:
    """Check that the ring fits into `runtime_dir`, that the directory is private, and how fast its memory is."""
    base = plan.runtime_dir
    probe = base / f"doctor-{os.getpid()}"
    try:
        make_private_directory(probe)
    except (ConfigError, OSError) as error:
        yield Finding(
            "ring directory",
            CheckState.FAIL,
            f"{base}: {error}",
            "remove this directory, or set runtime_dir to a directory of your own",
        )
        return
    try:
        yield from _ring_room(base, plan)
        if plan.ring_grows:
            yield _ring_growth(base, plan)
        yield _touch(probe)
    finally:
        probe.rmdir()
    yield from _stale_rings(base)


def _ring_room(base: Path, plan: CheckPlan) -> Iterator[Finding]:
    kind = file_system_of(base)
    in_memory = kind in IN_MEMORY
    yield Finding.from_condition(
        "ring directory",
        in_memory,
        f"{base} is on {kind}",
        "set runtime_dir to a directory in memory, such as /dev/shm: a ring on a disk is slow",
        CheckState.WARN,
    )
    free_bytes, needed_bytes = shutil.disk_usage(base).free, plan.ring_bytes + 16 * _MIB
    yield Finding.from_condition(
        "ring room",
        free_bytes >= needed_bytes,
        f"{free_bytes / _MIB:,.0f} MiB are free in {base}, and the ring takes {needed_bytes / _MIB:,.0f} MiB",
        "lower ring_bytes, or enlarge it: mount -o remount,size=... /dev/shm; in a container: --shm-size",
    )
    if in_memory:
        available_bytes = available_memory_bytes()
        yield Finding.from_condition(
            "memory",
            available_bytes >= needed_bytes,
            f"{available_bytes / _MIB:,.0f} MiB of memory available, and the ring takes {needed_bytes / _MIB:,.0f} MiB",
            "lower ring_bytes, or use a machine with more memory: a ring that is swapped out is slow",
        )


def _ring_growth(base: Path, plan: CheckPlan) -> Finding:
    grown_bytes = plan.ring_bytes + growth_bytes_in(base)
    image_bytes = image_chunks_max(grown_bytes // plan.chunk_bytes) * plan.chunk_bytes
    return Finding(
        "ring growth",
        CheckState.OK,
        f"as memory is now, the ring can grow to hold two checkpoints of {image_bytes / _MIB:,.0f} MiB each; larger "
        "ones stream through it at the store's speed",
    )


def _touch(directory: Path) -> Finding:
    # The first touch of memory is slow. The ring pays for it once, at its start; an ordinary checkpoint, each time.
    path = directory / "touch"
    try:
        with path.open("wb") as file:
            began = time.perf_counter()
            os.posix_fallocate(file.fileno(), 0, _TOUCH_BYTES)
            seconds = time.perf_counter() - began
    except OSError as error:
        return Finding(
            "ring memory",
            CheckState.FAIL,
            f"{directory}: {error.strerror}",
            "make room for the ring, as under `ring room`",
        )
    finally:
        path.unlink(missing_ok=True)
    return Finding("ring memory", CheckState.OK, f"first touch at {_TOUCH_BYTES / seconds / 1e9:.1f} GB/s")


def _stale_rings(base: Path) -> Iterator[Finding]:
    # Such a ring may hold staged checkpoints, so report it, but never delete it.
    for journal in sorted(base.glob("*/journal")):
        if not _has_flusher(journal.parent):
            yield Finding(
                "left ring",
                CheckState.WARN,
                f"{journal.parent} has a ring whose flusher is gone",
                "run `holdfast flusher --store URL` for its run: it publishes staged checkpoints and removes the ring",
            )


def _has_flusher(directory: Path) -> bool:
    try:
        with (directory / "flusher.pid").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def limits(_: CheckPlan) -> Iterator[Finding]:
    # Each connection to the store and each rank needs some open files.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Finding.from_condition(
        "open files",
        soft == resource.RLIM_INFINITY or soft >= _DESCRIPTORS_MIN,
        f"at most {soft} open files (hard limit {hard})",
        f"raise the limit: ulimit -n {_DESCRIPTORS_MIN}",
        CheckState.WARN,
    )


def clock(_: CheckPlan) -> Iterator[Finding]:
    """Check that the wall clock and the monotonic clock run at the same rate."""
    before = _wall_clock_ahead_seconds()
    time.sleep(_CLOCK_SECONDS)
    drift_seconds = abs(_wall_clock_ahead_seconds() - before)
    yield Finding.from_condition(
        "clock",
        drift_seconds <= _CLOCK_SLACK_SECONDS,
        f"the wall clock moved {drift_seconds * 1000:.1f} ms against the monotonic clock in {_CLOCK_SECONDS:g} s",
        "check chrony or ntpd: something sets the clock in jumps, so times in records are wrong",
        CheckState.WARN,
    )


def _wall_clock_ahead_seconds() -> float:
    # Use the fastest of several readings: a busy machine may pause between reading the two clocks.
    readings = []
    for _ in range(_CLOCK_READINGS):
        steady, wall = time.monotonic(), time.time()
        readings.append((time.monotonic() - steady, wall - steady))
    return min(readings)[1]


def network(_: CheckPlan) -> Iterator[Finding]:
    """Check the nominal speed of each interface. The stager's check measures the speed of MPI."""
    seen = False
    for interface in sorted(Path("/sys/class/net").glob("*")):
        if interface.name == "lo" or _read(interface / "operstate") != "up":
            continue
        seen = True
        speed, mtu = _read(interface / "speed"), _read(interface / "mtu")
        known = speed.lstrip("-").isdigit() and int(speed) > 0
        yield Finding.from_condition(
            f"network {interface.name}",
            not known or int(speed) >= _SLOW_MBITS,
            (f"{int(speed) / 1000:g} Gbit/s" if known else "speed not known") + f", MTU {mtu}",
            "use an instance with 10 Gbit/s or more: a slice of gigabytes takes seconds through this interface",
            CheckState.WARN,
        )
    if not seen:
        yield Finding(
            "network",
            CheckState.SKIPPED,
            "only the loopback interface is up",
            "nothing to do for a job on one machine",
        )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the interface reports no speed
        return ""
