"""Looks at a machine before money is spent on it: what a run needs, tried out for real, and what to mend.

    Plan ─► checks: {machine,store_checks}.py, and the roles' own (entry-point group `holdfast.checks`)
                └─► Finding: ok · warn · fail · skipped, what was seen, what to do

A check is a function of the plan that yields findings. It must clean up after itself and end: each wait in it has a
limit. A check that raises becomes a finding that failed; it never hides the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import entry_points

from holdfast.command.checks import CheckPlan, CheckState, Finding
from holdfast.errors import HoldfastError

_GROUP = "holdfast.checks"


Check = Callable[[CheckPlan], Iterable[Finding]]


def examine(plan: CheckPlan) -> Iterator[Finding]:
    """Run every check there is, one after the other, and give each finding as soon as it is known."""
    for check in _checks():
        try:
            yield from check(plan)
        except HoldfastError as error:
            yield Finding(_name(check), CheckState.FAIL, str(error), "see the message")
        except Exception as error:  # noqa: BLE001 - a check that breaks must not hide what the others find
            yield Finding(
                _name(check),
                CheckState.FAIL,
                f"the check itself broke: {type(error).__name__}: {error}",
                "report this",
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
            f"if this machine is to train or to stage: pip install 'holdfast[{name}]'",
        )

    return check


def _name(check: Check) -> str:
    return getattr(check, "__name__", "check").replace("_", " ")
