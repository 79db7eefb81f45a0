"""`holdfast export URL[@STEP] OUT --to safetensors|dcp|torch`: a checkpoint as other tools read it.

The writing is done by the trainers' package (trainer_side/doors), which has torch; `torch` is the portable file itself.
"""

from __future__ import annotations

from pathlib import Path

import click

from holdfast.command.doors import Exported, door
from holdfast.command.examples import examples
from holdfast.command.output import console, json_option, plain, print_json
from holdfast.command.place import place, place_folder
from holdfast.errors import ConfigError
from holdfast.image.manifest import Manifest, State
from operator_side.commands.pull import pull_file
from operator_side.commands.target import TARGET, Target

_SUFFIX = {"safetensors": ".safetensors", "dcp": "", "torch": ".pt"}
_TIED_SHOWN = 5


@click.command(
    "export",
    short_help="Write a checkpoint as other tools read it.",
    epilog=examples(
        "holdfast export s3://bucket/run model.safetensors --to safetensors --only model",
        "holdfast export /mnt/run@1000 step-1000.safetensors --to safetensors",
        "holdfast export /mnt/run@1000 dcp-folder --to dcp",
        "holdfast export /mnt/run@1000 step-1000.pt --to torch",
    ),
)
@click.argument("target", metavar="URL[@STEP]", type=TARGET)
@click.argument("destination", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--to", "kind", type=click.Choice([*_SUFFIX]), required=True, help="What to write.")
@click.option("--only", metavar="NAME", help="Only what is under this name of the state, such as `model`.")
@click.option("--force", is_flag=True, help="Replace OUT if it is there.")
@json_option
def export(
    as_json: bool, target: Target, destination: Path, kind: str, only: str | None, force: bool
) -> None:
    """Write a checkpoint of the run at URL to OUT, so that tools which know nothing of holdfast read it.

    \b
    safetensors  one file; tensors are named as their path, with dots: model.layer.0.weight,
                 and with --only model without it: layer.0.weight
    dcp          a folder of torch.distributed.checkpoint: dcp.load(state, checkpoint_id=OUT)
    torch        the portable file, as `holdfast pull` gives it: torch.load(OUT, weights_only=True)

    Without @STEP: the newest good checkpoint. Every byte is checked against its CRC-32 as it is read; OUT appears only
    when all are good and on disk. Memory is some windows of 16 MiB, whatever the size; with dcp one storage.

    In a safetensors file values that are no tensors stand in the metadata, as JSON under `holdfast`; one that JSON
    cannot hold is refused by its path. Tied tensors have bytes of their own each, and the metadata tells which are
    tied. PerRank values stay as they lie in the checkpoint: bytes, one tensor for each rank. All but torch needs the
    trainers' packages: pip install 'holdfast[trainer]'.

    JSON: {"url", "step", "attempt", "format", "destination", "nbytes", "tensors", "tied": {name: name}}.
    """  # noqa: D301 - the character itself is what tells click not to wrap the paragraph
    if kind == "torch" and only is not None:
        raise ConfigError(
            f"--only {only} with --to torch: the portable file is taken as it is; torch.load(OUT, mmap=True) reads no "
            "more of it than is used"
        )
    write = None if kind == "torch" else door(f"export-{kind}")
    catalog, manifest = target.find()
    if manifest.state is State.BAD:
        raise ConfigError(
            f"{manifest.file}: was read back and found bad ({manifest.note}), and is not exported; `holdfast ls` shows "
            "other steps"
        )
    store = catalog.store
    if kind == "dcp":
        path = place_folder(destination, ".metadata", force=force)
    else:
        path = place(destination, manifest.file.removesuffix(".pt") + _SUFFIX[kind], force=force)
    if write is None:
        pull_file(store, manifest, path, quiet=as_json)
        done = Exported(manifest.image_bytes, len(manifest.tensors), {})
    else:
        done = write(store, manifest, path, only=only, quiet=as_json)
    _say(store.url, manifest, kind, path, done, as_json=as_json)


def _say(url: str, manifest: Manifest, kind: str, path: Path, done: Exported, *, as_json: bool) -> None:
    if as_json:
        names = {"url": url, "step": manifest.step, "attempt": manifest.attempt, "format": kind}
        print_json({**names, "destination": str(path), **done._asdict()})
        return
    out = console()
    said = f"{path}: step {manifest.step} as {kind}, {done.tensors} tensors, {done.nbytes} bytes, all good"
    out.print(plain(said), markup=False, soft_wrap=True)
    for name, other in list(done.tied.items())[:_TIED_SHOWN]:
        out.print(plain(f"  {name} is tied to {other}: each has its own bytes in the file"), markup=False)
    if len(done.tied) > _TIED_SHOWN:
        out.print(f"  and {len(done.tied) - _TIED_SHOWN} more are tied")
