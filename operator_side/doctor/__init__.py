"""Checks a machine before a run, by trial, and says what to fix.

    CheckPlan ─► checks: machine, other_hosts, store_checks, and those of the roles (entry points `holdfast.checks`)
                     └─► Finding: ok · warn · fail · skipped, what was seen, what to fix

A check is a function of the plan that yields findings. It removes what it created, and each of its waits has a limit.
An exception in a check becomes a failed finding; the other checks still run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import entry_points

from holdfast.command.checks import CheckPlan, CheckState, Finding
from holdfast.errors import HoldfastError
from holdfast.extras import install_line

_GROUP = "holdfast.checks"


Check = Callable[[CheckPlan], Iterable[Finding]]


def examine(plan: CheckPlan) -> Iterator[Finding]:
    """Run every check in turn, and yield each finding as soon as it is known."""
    for check in _checks():
        try:
            yield from check(plan)
        except HoldfastError as error:
            yield Finding(_name(check), CheckState.FAIL, str(error), "fix what the message names")
        except Exception as error:  # noqa: BLE001 - a broken check must not hide the findings of the others
            yield Finding(
                _name(check),
                CheckState.FAIL,
                f"a bug in this check: {type(error).__name__}: {error}",
                "report it; the other checks are not affected",
            )


def _checks() -> Iterator[Check]:
    from operator_side.doctor import machine
    from operator_side.doctor import other_hosts as hosts
    from operator_side.doctor import store_checks as store

    yield from (machine.python, machine.shared_memory, machine.limits, machine.clock, machine.network)
    yield hosts.examine_hosts
    yield store.examine_store
    for point in sorted(entry_points(group=_GROUP), key=lambda point: point.name):
        try:
            yield point.load()
        except ImportError as error:
            yield _not_installed(point.name, error)


def _not_installed(name: str, error: ImportError) -> Check:
    def check(_: CheckPlan) -> Iterator[Finding]:
        yield Finding(
            name,
            CheckState.SKIPPED,
            f"{error.name or error} is not installed here",
            f"if this machine is for the {name}: {install_line(name)}",
        )

    return check


def _name(check: Check) -> str:
    return getattr(check, "__name__", "check").replace("_", " ")
