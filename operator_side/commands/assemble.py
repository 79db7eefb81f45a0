"""`holdfast assemble URL[@STEP]`: make the portable file of slices that training ranks wrote to the store themselves.

claim ─► newest complete set ─► file ─► manifest ─► read back ─► slices away      any act may be the last: run it again
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import click

from holdfast.checkpoints.assembly import assemble
from holdfast.checkpoints.catalog import Catalog
from holdfast.checkpoints.slice_sets import SliceSet, complete_sets, find_sets, load_set, remove_set
from holdfast.command.examples import examples
from holdfast.command.output import console, json_option, plain, print_json, progress_bar
from holdfast.errors import DamageError, StoreMissing
from holdfast.faultpoint import identify
from holdfast.image.manifest import Manifest, State
from holdfast.store.base import Store
from operator_side.commands.claimed import claimed, read_back
from operator_side.commands.target import TARGET, Target

_log = logging.getLogger("holdfast.cli")


class _Outcome(NamedTuple):
    manifest: Manifest | None
    removed: list[str]


@click.command(
    "assemble",
    short_help="Make a checkpoint of slices that ranks wrote to the store themselves.",
    epilog=examples(
        "holdfast assemble s3://bucket/run@1000 --keep-slices",
        "holdfast assemble s3://bucket/run",
    ),
)
@click.argument("target", metavar="URL[@STEP]", type=TARGET)
@click.option("--keep-slices", is_flag=True, help="Leave the slices where they are.")
@json_option
def assemble_command(as_json: bool, target: Target, keep_slices: bool) -> None:
    """Make the portable file of the newest complete set of slices in the run at URL; with @STEP, of that step.

    Ranks that have lost their stager write their slices to the store themselves (`holdfast ls` shows them as
    `slices`). The flusher of the next job makes a file of them by itself; this command does it without one. It takes
    the run's claim, so no flusher may be at work. Every byte is checked, and the file is read back before the slices
    are removed: this set, and without @STEP all older ones. Run it again if it was interrupted.

    Exit code 0 also if there was nothing to do; 5: no such set; 6: the slices are damaged, nothing was published;
    8: the run's writer is alive.

    JSON: {"url", "assembled": {"step", "attempt", "file", "nbytes", "crc32", "state"} or null, "removed": [name]}.
    """
    identify("tool")
    catalog = target.catalog()
    store = catalog.store
    if _chosen(catalog, target.step) is None:  # before the claim: looking must not need it
        _say(store, _Outcome(None, []), as_json=as_json)
        return
    with claimed(store) as (_, check):
        outcome = _run(catalog, target, check, keep_slices=keep_slices, quiet=as_json)
    _say(store, outcome, as_json=as_json)
    if outcome.manifest is not None and outcome.manifest.state is State.BAD:
        raise DamageError(f"{outcome.manifest.note}; the slices are kept, run it again")


def _run(
    catalog: Catalog, target: Target, check: Callable[[], None], *, keep_slices: bool, quiet: bool
) -> _Outcome:
    store, manifest = catalog.store, None
    for found in _chosen(catalog, target.step) or ():
        manifest = _manifest_of(catalog, found)
        try:
            if manifest is None:
                manifest = _assemble(store, found, check, quiet=quiet)
        except DamageError as error:
            if target.step is not None:
                raise
            _log.warning("not used: %s", error)
            continue
        if manifest.state is not State.VERIFIED:
            manifest = read_back(store, manifest, check, quiet=quiet)
        break
    else:
        raise DamageError(f"{store.url}: no complete set of slices can be used; the log above says why")
    removed: list[str] = []
    if manifest.state is State.VERIFIED and not keep_slices:
        check()
        order = manifest.order
        for found in find_sets(store.list()):
            if found.order == order or (target.step is None and found.order < order):
                removed += remove_set(store, found)
    return _Outcome(manifest, removed)


def _chosen(catalog: Catalog, step: int | None) -> Sequence[SliceSet] | None:
    """The sets to try, in order; None when all are older than a good checkpoint that is there anyway.

    Raises:
        StoreMissing: There is no complete set, or none of this step.
    """
    store = catalog.store
    sets = find_sets(store.list())
    complete = [found for found in complete_sets(sets) if step is None or found.step == step]
    if not complete:
        of_step = [found for found in sets if step is None or found.step == step]
        what = "no slices" if step is None else f"no slices of step {step}"
        raise StoreMissing(f"{store.url}: " + (of_step[0].fault if of_step else f"there are {what} here"))
    if step is not None:
        return complete
    good = max((i.manifest.order for i in catalog.list() if i.manifest and not i.fault), default=None)
    newer = [found for found in complete if good is None or found.order >= good]
    return newer or None


def _manifest_of(catalog: Catalog, found: SliceSet) -> Manifest | None:
    """What a run that was interrupted has published of this set already."""
    for item in catalog.list():
        if item.manifest is not None and not item.fault and item.manifest.order == found.order:
            return item.manifest
    return None


def _assemble(store: Store, found: SliceSet, check: Callable[[], None], *, quiet: bool) -> Manifest:
    loaded = load_set(store, found)
    with progress_bar(f"step {found.step}", loaded.layout.image_bytes, hidden=quiet) as advance:
        return assemble(store, loaded, check=check, progress=advance)


def _say(store: Store, outcome: _Outcome, *, as_json: bool) -> None:
    manifest = outcome.manifest
    if as_json:
        assembled = manifest and {
            "step": manifest.step,
            "attempt": manifest.attempt,
            "file": manifest.file,
            "nbytes": manifest.image_bytes,
            "crc32": manifest.image_crc32,
            "state": manifest.state.value,
        }
        print_json({"url": store.url, "assembled": assembled, "removed": outcome.removed})
        return
    out = console()
    if manifest is None:
        out.print(f"{store.url}: nothing to do, a newer checkpoint is published", markup=False)
        return
    said = f"{manifest.file}: step {manifest.step}, {manifest.image_bytes} bytes, {manifest.state}"
    out.print(plain(f"{said}; {len(outcome.removed)} objects of slices removed"), markup=False)
