"""`holdfast import FILE|FOLDER URL --step N`: makes a checkpoint of a run from a file of another tool.

file ─► the state; refuse values that cannot be saved ─► lease ─► file ─► manifest ─► read back     safe to run again
"""

from __future__ import annotations

import time
from pathlib import Path

import click

from holdfast.checkpoints.catalog import Catalog
from holdfast.checkpoints.image_publishing import publish_image
from holdfast.checkpoints.publish import ManifestFacts
from holdfast.command.converters import ImportSource, load_converter
from holdfast.command.examples import examples
from holdfast.command.output import json_option, print_json, print_line, progress_bar
from holdfast.errors import ConfigError, DamageError
from holdfast.faultpoint import identify
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.manifest import Manifest, State
from operator_side.commands.claimed import claimed, read_back
from operator_side.commands.options import count, exit_codes, flag, text
from operator_side.commands.target import URL, Target

_STEP_MAX = 2**62 - 1


@click.command(
    "import",
    short_help="Make a checkpoint from a file of torch.save, safetensors or DCP.",
    epilog=exit_codes(
        "3 FILE has a value that cannot be saved; the message names its path",
        "8 another process is writing to this run",
    )
    + examples(
        "holdfast import checkpoint.pt s3://bucket/new --step 4999",
        "holdfast import checkpoint.pt /mnt/new --step 4999 --rename model_state_dict=model --drop epoch",
        "holdfast import model.safetensors /mnt/tuned --step 0 --under model",
        "holdfast import dcp-folder /mnt/sharded --step 4999",
    ),
)
@click.argument("path", metavar="FILE", type=click.Path(exists=True, path_type=Path))
@click.argument("target", metavar="URL", type=URL)
@count(
    "--step",
    "Last training step that was done when FILE was saved; training continues with the next step.",
    least=0,
    most=_STEP_MAX,
    required=True,
)
@text(
    "--under", "Put the whole content of FILE under this name of the state, such as `model`.", metavar="NAME"
)
@text("--rename renames", "Rename a top-level name of FILE; repeatable.", metavar="OLD=NEW", multiple=True)
@text("--drop dropped", "Leave out a top-level name of FILE; repeatable.", metavar="NAME", multiple=True)
@flag("--force", "Import even into a run that has checkpoints; the imported one becomes the newest.")
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
    """Make a checkpoint of the run at URL from FILE, which torch.save or safetensors wrote, or from a folder of
    torch.distributed.checkpoint, of any number of ranks. The command reads FILE while it writes the checkpoint, so it
    needs little memory even for a large FILE.

    The top-level names of FILE must be those of the script's Checkpointer({"model": …, "optimizer": …}), each with the
    state_dict() of that object. Restore warns of names that only FILE has. A name that only the script has is an
    error, unless the script calls checkpointer.restore(may_lack=("rng",)); that object then keeps its initial state.

    FILE is read with weights_only=True, so no code in it is run. The run must have no checkpoint yet, and no job may be
    running on it. The command reads the checkpoint back at the end; run it again after an interruption.

    The command needs the trainers' packages (the extra `trainer`).

    JSON: {"url", "step", "attempt", "file", "nbytes", "crc32", "state", "format", "names": [name], "tensors"}.
    """
    identify("tool")
    renamed = dict(_parse_rename(text) for text in renames)
    source: ImportSource = load_converter("import")(path, under=under, renamed=renamed, dropped=dropped)
    catalog = target.catalog()
    store = catalog.store
    with claimed(store) as leased:
        if not force:
            _reject_existing_checkpoints(catalog)
        now, record = time.time(), {"imported": {"from": path.name[:255], "format": source.kind}}
        key, facts = CheckpointId(leased.attempt, step), ManifestFacts(now, now, record, "import")
        with progress_bar(path.name, source.layout.image_bytes, hidden=as_json) as advance:
            manifest = publish_image(leased, key, source, progress=advance, facts=facts)
        manifest = read_back(leased.store, manifest, quiet=as_json)
    _print_result(store.url, manifest, source, as_json=as_json)
    if manifest.state is State.BAD:
        raise DamageError(f"{manifest.file}: {manifest.note}; run the command again with --force")


def _parse_rename(text: str) -> tuple[str, str]:
    old, sign, new = text.partition("=")
    if not (old and sign and new):
        raise ConfigError(f"--rename {text}: expected OLD=NEW, such as model_state_dict=model")
    return old, new


def _reject_existing_checkpoints(catalog: Catalog) -> None:
    newest = catalog.newest_good()
    if newest is not None:
        raise ConfigError(
            f"{catalog.store.url}: this run has checkpoints already, the newest of step {newest.step}, and the "
            "imported checkpoint would become the newest; name a new run, or give --force"
        )


def _print_result(url: str, manifest: Manifest, source: ImportSource, *, as_json: bool) -> None:
    names = list(source.names)
    if as_json:
        place = {"url": url, "step": manifest.step, "attempt": manifest.attempt, "file": manifest.file}
        nbytes, crc32, state = manifest.image_bytes, manifest.image_crc32, manifest.state.value
        read = {"format": source.kind, "names": names, "tensors": source.tensors}
        print_json({**place, "nbytes": nbytes, "crc32": crc32, "state": state, **read})
        return
    shown = f"{manifest.file}: step {manifest.step}, {manifest.image_bytes} bytes, {manifest.state}"
    print_line(f"{shown}; it holds {', '.join(names)}")
