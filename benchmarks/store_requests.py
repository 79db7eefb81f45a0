"""Records the flushers' requests to their store, and picks those of a commit.

    noting() ─► environment of a job ─► noting_site ─► note() in each flusher ─► one line a request ─► read()

    S stagers: the last seal is written ─┐
    one: its last part is written ───────┴─► requests of the flusher that publishes ─► the manifest is written

A request is one call of the store's interface, retries included. Requests that overlap count as one round trip.
Requests to a directory are so short that threads would rarely overlap, so each one except a part's gets some
milliseconds more, as over a network.
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
    """One call. `begun`, `ended`: monotonic seconds, one clock for all processes of a machine."""

    pid: int
    what: str
    name: str
    begun: float
    ended: float


def noting(path: Path) -> dict[str, str]:
    """Return the environment in which a job's flushers record their requests in the file `path`."""
    folder = Path(__file__).resolve().parent
    places = [str(folder / "noting_site"), str(folder.parent), os.environ.get("PYTHONPATH", "")]
    return {_PATH: str(path), "PYTHONPATH": os.pathsep.join(filter(None, places))}


def note(path: str) -> None:
    """Record each request of this process from now on."""
    from holdfast.store.retrying import Retrying

    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    pid, forward = os.getpid(), Retrying.forward

    def noted(self: Retrying, method: str, call: Callable[[], Any], name: str = "") -> Any:
        begun = time.monotonic()
        if method != "write_part":
            time.sleep(_LATENCY_SECONDS)
        try:
            return forward(self, method, call, name)
        finally:
            # One write in append mode: lines of several processes do not mix.
            os.write(file, json.dumps([pid, method, name, begun, time.monotonic()]).encode() + b"\n")

    Retrying.forward = noted  # type: ignore[method-assign]


def read(path: Path) -> list[Request]:
    """Return all requests recorded so far, in the order of their ends. Empty before a flusher starts."""
    if not path.exists():
        return []
    return [Request(*json.loads(line)) for line in path.read_text().splitlines()]


def commit(requests: Sequence[Request], manifest: str) -> list[Request]:
    """Return the commit's requests: those that the flusher which wrote `manifest` made after the last seal, the
    manifest's own included. With one stager: after the end of the last part.

    Args:
        requests: Requests of checkpoints written one after the other.
        manifest: Name of the object.

    Raises:
        ValueError: `manifest` was not written, or no seal or part precedes it.
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
    """Whether this is a heartbeat, which the flusher writes periodically in a separate thread."""
    return one.what == "write" and one.name.startswith(_CLAIM)


def round_trips(requests: Sequence[Request]) -> int:
    """Return the length of the longest chain of requests that each began after the previous one ended."""
    count, until = 0, float("-inf")
    for one in sorted(requests, key=lambda one: one.ended):
        if one.begun >= until:
            count, until = count + 1, one.ended
    return count


def counted(requests: Sequence[Request]) -> Mapping[str, int]:
    """Count the requests by kind."""
    found: dict[str, int] = {}
    for one in requests:
        found[one.what] = found.get(one.what, 0) + 1
    return found
