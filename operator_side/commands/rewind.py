"""`holdfast rewind URL --to STEP`: makes training continue from an older checkpoint, on a new branch of the run."""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import click

from holdfast.checkpoints.branches import (
    REASON_CHARACTERS_MAX,
    SKIPS_MAX,
    Branches,
    Rewind,
    StepRange,
    format_ranges,
)
from holdfast.checkpoints.catalog import CatalogItem, CatalogListing
from holdfast.checkpoints.lease import find_local_writer, find_possibly_live_writer, newest_attempt
from holdfast.command.examples import examples
from holdfast.command.output import console, escape_controls, json_option, print_json, print_line, table
from holdfast.errors import ConfigError, DamageError, FencedError, StoreMissing
from holdfast.faultpoint import identify
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.store.base import Store
from operator_side.commands.claimed import claimed
from operator_side.commands.options import exit_codes, flag, text
from operator_side.commands.target import URL, Target

_STEP = re.compile(r"\d{1,18}", re.ASCII)
_RANGE = re.compile(r"(\d{1,18})\.\.(\d{1,18})", re.ASCII)
_NEAR_STEPS = 5
_ANY_ATTEMPT = 2**62


class _RewindPlan(NamedTuple):
    """The rewind that the command makes, or would make with --dry-run."""

    rewind: Rewind
    branches: Branches
    left_out_before: tuple[StepRange, ...]  # by the old branch after the fork, not by the new one

    @property
    def number(self) -> int:
        """The number of the new branch."""
        return 2 + len(self.branches.rewinds)


@click.command(
    short_help="Continue from an older checkpoint, on a new branch of the run.",
    epilog=exit_codes(
        "0 the run was rewound, or listed",
        "2 an option is wrong",
        "5 there is no such good checkpoint; the message names the nearest ones",
        "8 a job, or another process, is writing to this run",
    )
    + examples(
        "holdfast rewind s3://bucket/run --to 10000 --skip-batches 10150..10200 --reason 'loss spike'",
        "holdfast rewind s3://bucket/run --to 10200-a1      # back to the branch that was left",
        "holdfast rewind s3://bucket/run --list",
    ),
)
@click.argument("target", metavar="URL", type=URL)
@text(
    "--to",
    "Step of the checkpoint to continue from; STEP-aATTEMPT, such as 10200-a1, names one of an older branch.",
    metavar="STEP",
)
@text(
    "--skip-batches skips",
    "Leave out the batches of training steps N to M, both included; repeatable.",
    metavar="N..M",
    multiple=True,
)
@text("--reason", "Text that is stored with the branch and shown by --list.", "")
@flag("--list only_list", "List the branches of the run, and change nothing.")
@flag("--dry-run", "Check everything and say what would happen; change nothing.")
@json_option
def rewind(
    as_json: bool,
    target: Target,
    to: str | None,
    skips: tuple[str, ...],
    reason: str,
    only_list: bool,
    dry_run: bool,
) -> None:
    """Let the next job of the run at URL continue from the checkpoint of an older step. Stop the job first, rewind, and
    start the same command again.

    A new branch begins there. The checkpoints of the older branch stay as they are: `holdfast ls` shows them, @STEP
    names them, and retention counts each branch for itself. The next restore skips them, in the store, in local tiers
    and in the stager's ring. To undo a rewind, rewind to a checkpoint of the older branch.

    --skip-batches leaves out the batches that training would use for steps N to M if it continued from STEP without
    this option: step N gets the batch of step M+1. Samplers in the state do this (docs/data.md).

    JSON: {"url", "rewound": {"branch", "attempt", "to_step", "to_attempt", "from_step", "from_attempt", "skipped":
    [[N, M]], "reason"} or null with --list, "dry_run", "branches": [{"branch", "current", "from_step", "from_attempt",
    "checkpoints", "newest_step", "newest_attempt", "files", "skipped", "made_at", "reason"}]}. from_step of a branch is
    the step that it continued from; null for the first one.
    """
    identify("tool")
    listing = target.read_listing()
    store = target.catalog().store
    if only_list:
        if to is not None or skips or dry_run:
            raise ConfigError("--list changes nothing; leave out the other options")
        _print_branches(listing, None, as_json=as_json, dry_run=False)
        return
    if to is None:
        raise ConfigError("expected --to with the step to continue from, or --list")
    if len(reason) > REASON_CHARACTERS_MAX:
        raise ConfigError(f"--reason: expected at most {REASON_CHARACTERS_MAX} characters, got {len(reason)}")
    ranges = _parse_ranges(skips)
    # Check before taking the lease, which uses up an attempt number; a job without a stager holds no lease.
    if writer := find_local_writer(store) or (
        find_possibly_live_writer(store, _ANY_ATTEMPT) if dry_run else ""
    ):
        raise FencedError(
            f"{store.url}: {writer} may be writing to this run; end the job first, and wait until its flusher has "
            "ended: a running job would not notice the rewind"
        )
    plan = _plan(listing, to, ranges, reason, newest_attempt(store) + 1)
    if not dry_run:
        with claimed(store) as leased:
            listing = CatalogListing(store)  # from here on no other process writes
            plan = _plan(listing, to, ranges, reason, leased.attempt)
            _write(leased.store, plan.rewind)
        listing = CatalogListing(store)
    if as_json:
        _print_branches(listing, plan, as_json=True, dry_run=dry_run)
    else:
        _print_result(store.url, plan, dry_run=dry_run)


def _parse_ranges(given: Sequence[str]) -> tuple[StepRange, ...]:
    found = []
    for range_text in given:
        match = _RANGE.fullmatch(range_text)
        if match is None or int(match[1]) > int(match[2]):
            raise ConfigError(
                f"--skip-batches {range_text}: expected two steps N..M, such as 10150..10200, N not above M"
            )
        found.append(StepRange(int(match[1]), int(match[2])))
    found.sort()
    for one, other in itertools.pairwise(found):
        if other.first <= one.last:
            raise ConfigError(f"--skip-batches: {one} and {other} overlap; give them as one range")
    if len(found) > SKIPS_MAX:
        raise ConfigError(f"--skip-batches: expected at most {SKIPS_MAX} ranges, got {len(found)}")
    return tuple(found)


def _plan(
    listing: CatalogListing, to: str, ranges: tuple[StepRange, ...], reason: str, attempt: int
) -> _RewindPlan:
    branches = listing.branches or Branches()
    fork = _fork(listing, branches, to)
    if ranges and ranges[0].first <= fork.step:
        raise ConfigError(
            f"--skip-batches {ranges[0]}: training continues with step {fork.step + 1}; the batches up to step "
            f"{fork.step} are in the checkpoint already"
        )
    known = branches.rewind_since(fork) if branches.is_current(fork) else None
    rewind = Rewind(
        attempt=attempt,
        write_id=uuid.uuid4().hex,
        to=fork,
        newest=max([fork, *(one.order for one in listing.current[:1])]),
        skips=ranges,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        reason=reason,
    )
    return _RewindPlan(rewind, branches, known.skipped if known is not None else ())


def _fork(listing: CatalogListing, branches: Branches, to: str) -> CheckpointId:
    """Find the checkpoint of `--to`. Raises `ConfigError`, `StoreMissing`; `DamageError`: restore would not use it."""
    try:
        wanted = None if _STEP.fullmatch(to) else CheckpointId.from_label(to)
    except ValueError:
        raise ConfigError(f"--to {to}: expected a step such as 10000, or 10000-a3 of attempt 3") from None
    step = int(to) if wanted is None else wanted.step
    listed = [one for one in listing.manifests if one.order.step == step and wanted in {None, one.order}]
    current = [one for one in listed if wanted is not None or branches.is_current(one.order)]
    items = list(listing.items(current))
    good = next((item for item in items if item.is_good and not item.caveat), None)
    if good is not None:
        return good.order
    near = _describe_nearest(listing, step)
    if items:
        why = items[0].fault or items[0].caveat
        raise DamageError(f"{listing.url}: restore would not continue from {items[0].order}: {why}; {near}")
    if listed:
        labels = ", ".join(one.order.label for one in listed)
        raise StoreMissing(f"{listing.url}: step {step} is on an older branch only; name it {labels}; {near}")
    raise StoreMissing(f"{listing.url}: no checkpoint {to}; {near}")


def _describe_nearest(listing: CatalogListing, step: int) -> str:
    names = sorted(listing.current, key=lambda one: (abs(one.order.step - step), one.order))
    usable = (item.order for item in listing.items(names) if item.is_good and not item.caveat)
    found = sorted(itertools.islice(usable, _NEAR_STEPS))
    return f"good ones near it: {', '.join(map(str, found))}" if found else "there is no good one"


def _write(store: Store, rewind: Rewind) -> None:
    data = rewind.to_bytes()
    # Read back: if the answer to `create` was lost, the retry finds its own file.
    if not store.create(rewind.name, data) and store.read(rewind.name) != data:
        raise FencedError(f"{store.url}/{rewind.name}: another process has written it; run the command again")


# -- output ------------------------------------------------------------------------------------------------------


def _print_result(url: str, plan: _RewindPlan, *, dry_run: bool) -> None:
    made = plan.rewind
    would = "would be" if dry_run else "was"
    print_line(
        f"{url}: the run {would} rewound from {made.abandoned} to {made.fork}; branch {plan.number} begins there"
    )
    print_line(f"the next job continues with step {made.fork.step + 1}")
    for first, last in made.skips:
        print_line(
            f"the batches of steps {first} to {last} are left out: step {first} gets that of step {last + 1}"
        )
    if plan.left_out_before:
        print_line(
            f"the older branch left out steps {format_ranges(plan.left_out_before)} after this step; the new one "
            "leaves out only what --skip-batches names"
        )
    if not dry_run:
        print_line(f"to undo it: holdfast rewind {url} --to {made.abandoned.label}")


def _print_branches(
    listing: CatalogListing, plan: _RewindPlan | None, *, as_json: bool, dry_run: bool
) -> None:
    branches = listing.branches or Branches()
    rows = _rows(branches, list(listing.items()))
    if as_json:
        print_json(
            {"url": listing.url, "rewound": plan and _rewound(plan), "dry_run": dry_run, "branches": rows}
        )
        return
    shown = table(
        "BRANCH", "FROM", "CHECKPOINTS", "NEWEST", "LEFT OUT", "MADE", "REASON", right=("CHECKPOINTS",)
    )
    for row in rows:
        name = f"{row['branch']}, current" if row["current"] else str(row["branch"])
        origin = "-" if row["from_step"] is None else f"{row['from_step']}-a{row['from_attempt']}"
        newest = "-" if row["newest_step"] is None else f"{row['newest_step']}-a{row['newest_attempt']}"
        skipped = format_ranges(StepRange(*pair) for pair in row["skipped"]) or "-"
        made_at, reason = row["made_at"] or "-", row["reason"] or "-"
        cells = (name, origin, str(row["checkpoints"]), newest, skipped, made_at, reason)
        shown.add_row(*map(escape_controls, cells))
    console().print(shown)


def _rows(branches: Branches, items: Sequence[CatalogItem]) -> list[dict[str, Any]]:
    made: list[Rewind | None] = [None, *branches.rewinds]
    rows = []
    for number, origin in enumerate(made, 1):
        of_branch = [item for item in items if branches.number(item.attempt) == number]
        newest = of_branch[0].order if of_branch else None
        rows.append(
            {
                "branch": number,
                "current": number == len(made),
                "from_step": None if origin is None else origin.fork.step,
                "from_attempt": None if origin is None else origin.fork.attempt,
                "checkpoints": len(of_branch),
                "newest_step": None if newest is None else newest.step,
                "newest_attempt": None if newest is None else newest.attempt,
                "files": [item.name for item in of_branch if not branches.is_current(item.order)],
                "skipped": [] if origin is None else [list(pair) for pair in origin.skips],
                "made_at": "" if origin is None else origin.made_at,
                "reason": "" if origin is None else origin.reason,
            }
        )
    return rows


def _rewound(plan: _RewindPlan) -> dict[str, Any]:
    made = plan.rewind
    to, left = made.fork, made.abandoned
    ends = {"to_step": to.step, "to_attempt": to.attempt, "from_step": left.step}
    more = {"skipped": [list(pair) for pair in made.skips], "reason": made.reason}
    return {"branch": plan.number, "attempt": made.attempt, **ends, "from_attempt": left.attempt, **more}
