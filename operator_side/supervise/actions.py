"""What the core asks for; the supervisor carries it out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from operator_side.supervise.hosts import Host
from operator_side.supervise.verdict import Verdict

__all__ = [
    "Action",
    "Finish",
    "Kill",
    "Launch",
    "Look",
    "Note",
    "Terminate",
]


class Look(NamedTuple):
    """Look at the fleet, now and every so often. `replace`: each time ask it for so many slots more."""

    replace: int = 0


class Launch(NamedTuple):
    """Start mpirun with so many trainers."""

    attempt: int
    ranks: int
    hosts: tuple[Host, ...] | None


class Terminate(NamedTuple):
    """Ask the attempt to end: gently the trainers alone, else mpirun itself."""

    gently: bool


class Kill(NamedTuple):
    """SIGKILL whatever is left of the attempt."""


class Note(NamedTuple):
    """Something for people and for the status file."""

    event: str
    message: str
    fields: Mapping[str, Any] = {}
    loud: bool = False


class Finish(NamedTuple):
    """The run is over."""

    verdict: Verdict


Action = Look | Launch | Terminate | Kill | Note | Finish
