"""The requests of flushers to their store, which each of them notes, and those that a commit makes.

    noting() ─► environment of a job ─► noting_site ─► note() in each flusher ─► one line a request ─► read()

    S stagers: the last seal is written ─┐
    one: its last part is written ───────┴─► requests of the flusher that publishes ─► the manifest is written

A request is one call of the store's interface; tries of the same call are one. Requests that overlap are one round
trip. Requests of a directory take so little that threads would run them one after the other by chance, so each but a
part's takes some milliseconds more, as over a network.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Request", "commit", "counted", "note", "noting", "read", "round_trips"]

_PATH = "BENCH_REQUESTS"
_SEAL = ".seal-"
_CLAIM = ".holdfast/writer-"
_LATENCY_SECONDS = 0.005


class Request(NamedTuple):
    """One call. `begun`, `ended`: monotonic seconds, which all processes of a machine share."""

    pid: int
    what: str
    name: str
    begun: float
    ended: float


def noting(path: Path) -> dict[str, str]:
    """The environment of a job whose flushers note their requests in the file `path`."""
    folder = Path(__file__).resolve().parent
    places = [str(folder / "noting_site"), str(folder.parent), os.environ.get("PYTHONPATH", "")]
    return {_PATH: str(path), "PYTHONPATH": os.pathsep.join(filter(None, places))}


def note(path: str) -> None:
    """Note each request of this process from now on."""
    from holdfast.store.retrying import Retrying

    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    pid, forward = os.getpid(), Retrying.forward

    def noted(self: Retrying, what: str, call: Callable[[], Any], name: str = "") -> Any:
        begun = time.monotonic()
        if what != "write_part":
            time.sleep(_LATENCY_SECONDS)
        try:
            return forward(self, what, call, name)
        finally:
            # One write to a file that is appended to: lines of several processes do not mix.
            os.write(file, json.dumps([pid, what, name, begun, time.monotonic()]).encode() + b"\n")

    Retrying.forward = noted  # type: ignore[method-assign]


def read(path: Path) -> list[Request]:
    """All requests that were noted so far, as they ended. None where no flusher has begun."""
    if not path.exists():
        return []
    return [Request(*json.loads(line)) for line in path.read_text().splitlines()]


def commit(requests: Sequence[Request], manifest: str) -> list[Request]:
    """The requests that the flusher which wrote `manifest` made from then on that all was sealed, the manifest's own
    included. With one stager: from the end of the last part.

    Args:
        requests: For checkpoints that were written one after the other.
        manifest: Name of the object.

    Raises:
        ValueError: It was not written, or nothing was before it.
    """
    published = next((one for one in requests if one.what == "create" and one.name == manifest), None)
    if published is None:
        raise ValueError(f"no flusher has written {manifest}")
    before = [one for one in requests if one.ended <= published.begun]
    if not any(one.what == "write_part" for one in before):
        raise ValueError(f"{manifest}: no part was written before it")
    # The seals of an earlier checkpoint are older than the parts of this one.
    begun = max(one.ended for one in before if one.what == "write_part" or _is_seal(one))
    mine = (one for one in requests if one.pid == published.pid and begun <= one.begun <= published.begun)
    return sorted((one for one in mine if not _is_beat(one)), key=lambda one: one.begun)


def _is_seal(one: Request) -> bool:
    return one.what in ("write", "create") and _SEAL in one.name


def _is_beat(one: Request) -> bool:
    """The flusher shows from time to time, in a thread of its own, that it lives."""
    return one.what == "write" and one.name.startswith(_CLAIM)


def round_trips(requests: Sequence[Request]) -> int:
    """The most of them of which each began after the one before it had ended."""
    count, until = 0, float("-inf")
    for one in sorted(requests, key=lambda one: one.ended):
        if one.begun >= until:
            count, until = count + 1, one.ended
    return count


def counted(requests: Sequence[Request]) -> Mapping[str, int]:
    """How many there are of each kind."""
    found: dict[str, int] = {}
    for one in requests:
        found[one.what] = found.get(one.what, 0) + 1
    return found
