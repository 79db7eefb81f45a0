"""Looks at a machine before money is spent on it: what a run needs, tried out for real, and what to mend.

    Plan ─► checks: holdfast/doctor/{machine,store}.py, and the roles' own (entry-point group `holdfast.checks`)
                └─► Finding: ok · warn · fail · skipped, what was seen, what to do

A check is a function of the plan that yields findings. It must clean up after itself and end: each wait in it has a
limit. A check that raises becomes a finding that failed; it never hides the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import entry_points
from pathlib import Path

from holdfast.errors import HoldfastError

__all__ = ["Check", "Finding", "Plan", "State", "examine"]

_GROUP = "holdfast.checks"


class State(StrEnum):
    """How a check ended. `fail`: a run cannot work so. `warn`: it can, but worse or less safely."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check saw.

    Attributes:
        check: Short and stable, such as `mpi ulfm`; for `--json` and for people who grep.
        state: How it ended.
        seen: What was found, with figures.
        fix: What to do about it; empty when it is ok.
    """

    check: str
    state: State
    seen: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the run is going to need.

    Attributes:
        store: URL of the run, or None: the store is not looked at.
        runtime_dir: Where the ring will lie.
        ring_bytes: Its size. `chunk_bytes`: size of a chunk.
        hostfile: Hosts of the MPI job, for mpirun; None: this machine alone.
    """

    store: str | None
    runtime_dir: Path
    ring_bytes: int
    chunk_bytes: int
    hostfile: Path | None = None


Check = Callable[[Plan], Iterable[Finding]]


def examine(plan: Plan) -> Iterator[Finding]:
    """Run every check there is, one after the other, and give each finding as soon as it is known."""
    for check in _checks():
        try:
            yield from check(plan)
        except HoldfastError as error:
            yield Finding(_name(check), State.FAIL, str(error), "see the message")
        except Exception as error:  # noqa: BLE001 - a check that breaks must not hide what the others find
            yield Finding(
                _name(check),
                State.FAIL,
                f"the check itself broke: {type(error).__name__}: {error}",
                "report this",
            )


def _checks() -> Iterator[Check]:
    from operator_side.doctor import hosts, machine, store

    yield from (machine.python, machine.shared_memory, machine.limits, machine.clock, machine.network)
    yield hosts.examine_hosts
    yield store.examine_store
    for point in sorted(entry_points(group=_GROUP), key=lambda point: point.name):
        try:
            yield point.load()
        except ImportError as error:
            yield _not_installed(point.name, error)


def _not_installed(name: str, error: ImportError) -> Check:
    def check(_: Plan) -> Iterator[Finding]:
        yield Finding(
            name,
            State.SKIPPED,
            f"{error.name or error} is not installed here",
            f"if this machine is to train or to stage: pip install 'holdfast[{name}]'",
        )

    return check


def _name(check: Check) -> str:
    return getattr(check, "__name__", "check").replace("_", " ")
