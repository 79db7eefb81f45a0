"""`holdfast assemble URL[@STEP]`: make a checkpoint file from slices that training ranks wrote to the store.

claim ─► newest complete set ─► file ─► manifest ─► read back ─► slices removed      safe to interrupt and run again
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import click

from holdfast.checkpoints.assembly import assemble
from holdfast.checkpoints.catalog import Catalog
from holdfast.checkpoints.lease import LeasedRun
from holdfast.checkpoints.slice_sets import SliceSet, complete_sets, find_sets, load_set, remove_set
from holdfast.command.examples import examples
from holdfast.command.output import console, json_option, plain, print_json, progress_bar
from holdfast.errors import DamageError, StoreMissing
from holdfast.faultpoint import identify
from holdfast.image.manifest import Manifest, State
from holdfast.store.base import Store
from operator_side.commands.claimed import claimed, published, read_back
from operator_side.commands.options import exit_codes
from operator_side.commands.target import TARGET, Target

_log = logging.getLogger("holdfast.cli")


class _Outcome(NamedTuple):
    manifest: Manifest | None
    removed: list[str]


@click.command(
    "assemble",
    short_help="Make a checkpoint file from slices that ranks wrote to the store.",
    epilog=exit_codes(
        "0 the file was made, or there was nothing to do",
        "5 there is no complete set of slices",
        "6 the slices are damaged; nothing was published",
        "8 another process is writing to this run",
    )
    + examples(
        "holdfast assemble s3://bucket/run@1000 --keep-slices",
        "holdfast assemble s3://bucket/run",
    ),
)
@click.argument("target", metavar="URL[@STEP]", type=TARGET)
@click.option(
    "--keep-slices",
    is_flag=True,
    help="Keep the slices in the store after the checkpoint file was made from them.",
)
@json_option
def assemble_command(as_json: bool, target: Target, keep_slices: bool) -> None:
    """Make a checkpoint file from the newest complete set of slices in the run at URL; with @STEP, from the slices of
    that step.

    Ranks that have lost their stager write their slices to the store themselves; `holdfast ls` shows such a step as
    `slices`. The flusher of the next job makes a file from them; this command does it without a job. The command takes
    the claim on the run, so it is refused while a flusher works on the run. It checks every byte and reads the file
    back before it removes the slices of this step and, without @STEP, the slices of all older steps. Run it again
    after an interruption.

    JSON: {"url", "assembled": {"step", "attempt", "file", "nbytes", "crc32", "state"} or null, "removed": [name]}.
    """
    identify("tool")
    catalog = target.catalog()
    store = catalog.store
    if _chosen(catalog, target.step) is None:  # before the claim: looking must not need it
        _say(store, _Outcome(None, []), as_json=as_json)
        return
    with claimed(store) as ours:
        outcome = _run(ours, target, keep_slices=keep_slices, quiet=as_json)
    _say(store, outcome, as_json=as_json)
    if outcome.manifest is not None and outcome.manifest.state is State.BAD:
        raise DamageError(
            f"{outcome.manifest.file}: {outcome.manifest.note}; the slices are kept: run the command again"
        )


def _run(ours: LeasedRun, target: Target, *, keep_slices: bool, quiet: bool) -> _Outcome:
    store, manifest = ours.store, None
    catalog = Catalog(store)
    for found in _chosen(catalog, target.step) or ():
        manifest = _manifest_of(catalog, found)
        try:
            if manifest is None:
                manifest = _assemble(ours, found, quiet=quiet)
        except DamageError as error:
            if target.step is not None:
                raise
            _log.warning("this set of slices is damaged and is not used: %s", error)
            continue
        if manifest.state is not State.VERIFIED:
            manifest = read_back(store, manifest, quiet=quiet)
        break
    else:
        raise DamageError(
            f"{store.url}: every complete set of slices is damaged; the log above names the damage"
        )
    removed: list[str] = []
    if manifest.state is State.VERIFIED and not keep_slices:
        order = manifest.order
        for found in find_sets(store.list()):
            if found.order == order or (target.step is None and found.order < order):
                removed += remove_set(store, found)
    return _Outcome(manifest, removed)


def _chosen(catalog: Catalog, step: int | None) -> Sequence[SliceSet] | None:
    """The sets to try, in order. None: all of them are older than a good checkpoint of the run. Raises `StoreMissing`:
    there is no complete set, or none of this step.
    """
    store = catalog.store
    sets = find_sets(store.list())
    complete = [found for found in complete_sets(sets) if step is None or found.step == step]
    if not complete:
        of_step = [found for found in sets if step is None or found.step == step]
        what = "no slices" if step is None else f"no slices of step {step}"
        raise StoreMissing(
            f"{store.url}: "
            + (
                of_step[0].fault
                if of_step
                else f"there are {what}; `holdfast ls` lists the checkpoints of this run"
            )
        )
    if step is not None:
        return complete
    good = catalog.newest_good()
    newer = [found for found in complete if good is None or found.order >= good.order]
    return newer or None


def _manifest_of(catalog: Catalog, found: SliceSet) -> Manifest | None:
    # An interrupted call of this command may have published the set already.
    of_step = catalog.of_step(found.step)
    return next((item.manifest for item in of_step if item.is_good and item.order == found.order), None)


def _assemble(ours: LeasedRun, found: SliceSet, *, quiet: bool) -> Manifest:
    loaded = load_set(ours.store, found)
    with progress_bar(f"step {found.step}", loaded.layout.image_bytes, hidden=quiet) as advance:
        return assemble(ours.store, loaded, attempt=ours.attempt, check=ours.check, progress=advance)


def _say(store: Store, outcome: _Outcome, *, as_json: bool) -> None:
    manifest = outcome.manifest
    if as_json:
        assembled = manifest and published(manifest)
        print_json({"url": store.url, "assembled": assembled, "removed": outcome.removed})
        return
    out = console()
    if manifest is None:
        out.print(f"{store.url}: nothing to do: a newer checkpoint is already published", markup=False)
        return
    said = f"{manifest.file}: step {manifest.step}, {manifest.image_bytes} bytes, {manifest.state}"
    out.print(plain(f"{said}; {len(outcome.removed)} slice objects removed"), markup=False)
