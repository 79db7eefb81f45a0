"""`holdfast import FILE|FOLDER URL --step N`: what another tool has saved becomes a checkpoint of a run.

file ─► the state, and can it be saved? ─► claim ─► file ─► manifest ─► read back     any act may be the last: again
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from holdfast.checkpoints.assembly import publish_image
from holdfast.checkpoints.catalog import Catalog
from holdfast.checkpoints.publish import Times
from holdfast.checkpoints.slice_sets import complete_sets
from holdfast.command.doors import Foreign, door
from holdfast.command.examples import examples
from holdfast.command.output import console, json_option, plain, print_json, progress_bar
from holdfast.errors import ConfigError, DamageError
from holdfast.faultpoint import identify
from holdfast.image.manifest import Key, Manifest, State
from operator_side.commands.claimed import claimed, read_back
from operator_side.commands.target import URL, Target

_STEP_MAX = 2**62 - 1


@click.command(
    "import",
    short_help="Make a checkpoint of what another tool has saved.",
    epilog=examples(
        "holdfast import checkpoint.pt s3://bucket/new --step 4999",
        "holdfast import checkpoint.pt /mnt/new --step 4999 --rename model_state_dict=model --drop epoch",
        "holdfast import model.safetensors /mnt/tuned --step 0 --under model",
        "holdfast import dcp-folder /mnt/sharded --step 4999",
    ),
)
@click.argument("path", metavar="FILE", type=click.Path(exists=True, path_type=Path))
@click.argument("target", metavar="URL", type=URL)
@click.option(
    "--step",
    type=click.IntRange(0, _STEP_MAX),
    required=True,
    help="The step that was done last when it was saved; training goes on with the next.",
)
@click.option("--under", metavar="NAME", help="Put all of it under this name of the state, such as `model`.")
@click.option(
    "--rename",
    "renames",
    multiple=True,
    metavar="OLD=NEW",
    help="Another name for one at the top; repeatable.",
)
@click.option(
    "--drop", "dropped", multiple=True, metavar="NAME", help="Leave out a name at the top; repeatable."
)
@click.option(
    "--force", is_flag=True, help="Also into a run that has checkpoints: this one becomes the newest."
)
@json_option
def import_state(
    as_json: bool,
    path: Path,
    target: Target,
    step: int,
    under: str | None,
    renames: tuple[str, ...],
    dropped: tuple[str, ...],
    force: bool,
) -> None:
    """Make a checkpoint of the run at URL of FILE, which torch.save or safetensors has written, or of a folder of
    torch.distributed.checkpoint (of any number of ranks; all of it is in memory for a while).

    The names at its top are to be those of the script's Checkpointer({"model": …, "optimizer": …}), each with the
    state_dict() of that object; what is left over is not restored, and said. A name that the script has and FILE has
    not is an error, unless the script says checkpointer.restore(may_lack=("rng",)): then it stays as it is.

    FILE is read with weights_only=True: nothing in it is run. The run must have no checkpoint yet, and no job may be at
    work on it. The file is read back in the end; run it again if it was interrupted.

    Exit code 3: FILE holds what cannot be saved, by its path; 8: the run's writer is alive. Needs the trainers'
    packages: pip install 'holdfast[trainer]'.

    JSON: {"url", "step", "attempt", "file", "nbytes", "crc32", "state", "format", "names": [name], "tensors"}.
    """
    identify("tool")
    renamed = dict(_pair(text) for text in renames)
    foreign: Foreign = door("import")(path, under=under, renamed=renamed, dropped=dropped)
    catalog = target.catalog()
    store = catalog.store
    with claimed(store) as (attempt, check):
        if not force:
            _refuse_beside_others(catalog)
        now = time.time()
        key = Key(attempt, step)
        with progress_bar(path.name, foreign.image_bytes, hidden=as_json) as advance:
            manifest = publish_image(
                store,
                key,
                foreign.image(key),
                _nothing_to_read,
                check=check,
                progress=advance,
                times=Times(now, now),
                record={"imported": {"from": path.name[:255], "format": foreign.kind}},
                writer="import",
            )
        manifest = read_back(store, manifest, check, quiet=as_json)
    _say(store.url, manifest, foreign, as_json=as_json)
    if manifest.state is State.BAD:
        raise DamageError(f"{manifest.note}; run it again with --force")


def _pair(text: str) -> tuple[str, str]:
    old, sign, new = text.partition("=")
    if not (old and sign and new):
        raise ConfigError(f"--rename {text}: expected OLD=NEW, such as model_state_dict=model")
    return old, new


def _refuse_beside_others(catalog: Catalog) -> None:
    """An import into the wrong run would become its newest checkpoint."""
    good = [item.step for item in catalog.list() if not item.fault]
    good += [found.step for found in complete_sets(catalog.slices())]
    if good:
        raise ConfigError(
            f"{catalog.store.url}: has checkpoints (step {good[0]} is the newest), and an import would become the "
            "newest; name a new run, or give --force"
        )


def _nothing_to_read(*_: object) -> None:
    raise AssertionError("the state is in memory")


def _say(url: str, manifest: Manifest, foreign: Foreign, *, as_json: bool) -> None:
    names = list(foreign.names)
    if as_json:
        said: dict[str, Any] = {
            "url": url,
            "step": manifest.step,
            "attempt": manifest.attempt,
            "file": manifest.file,
            "nbytes": manifest.image_bytes,
            "crc32": manifest.image_crc32,
            "state": manifest.state.value,
            "format": foreign.kind,
            "names": names,
            "tensors": foreign.tensors,
        }
        print_json(said)
        return
    shown = f"{manifest.file}: step {manifest.step}, {manifest.image_bytes} bytes, {manifest.state}"
    console().print(plain(f"{shown}; it holds {', '.join(names)}"), markup=False, soft_wrap=True)
