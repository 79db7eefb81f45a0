"""`holdfast export URL[@STEP] OUT --to safetensors|dcp|torch`: writes a checkpoint in a format that other tools read.

trainer_side/convert, which has torch, writes it; `torch` is the checkpoint file itself.
"""

from __future__ import annotations

from pathlib import Path

import click

from holdfast.command.converters import ExportResult, load_converter
from holdfast.command.examples import examples
from holdfast.command.output import json_option, print_json, print_line
from holdfast.command.place import check_file_place, check_folder_place
from holdfast.errors import ConfigError
from holdfast.image.manifest import Manifest
from operator_side.commands.options import choice, force_flag, text
from operator_side.commands.pull import pull_file
from operator_side.commands.target import TARGET, Target

_SUFFIX = {"safetensors": ".safetensors", "dcp": "", "torch": ".pt"}
_TIED_SHOWN = 5


@click.command(
    "export",
    short_help="Write a checkpoint in a format that other tools read.",
    epilog=examples(
        "holdfast export s3://bucket/run model.safetensors --to safetensors --only model",
        "holdfast export /mnt/run@1000 step-1000.safetensors --to safetensors",
        "holdfast export /mnt/run@1000 dcp-folder --to dcp",
        "holdfast export /mnt/run@1000 step-1000.pt --to torch",
    ),
)
@click.argument("target", metavar="URL[@STEP]", type=TARGET)
@click.argument("destination", metavar="OUT", type=click.Path(path_type=Path))
@choice("--to kind", [*_SUFFIX], "Format to write.", required=True)
@text("--only", "Export only the part of the state with this name, such as `model`.", metavar="NAME")
@force_flag("OUT")
@json_option
def export(
    as_json: bool, target: Target, destination: Path, kind: str, only: str | None, force: bool
) -> None:
    """Write a checkpoint of the run at URL to OUT, in a format that other tools read without holdfast.

    \b
    safetensors  one file; a tensor's name is its path with dots: model.layer.0.weight,
                 or layer.0.weight with --only model
    dcp          a folder for torch.distributed.checkpoint: dcp.load(state, checkpoint_id=OUT)
    torch        the file that `holdfast pull` copies: torch.load(OUT, weights_only=True)

    Without @STEP the command exports the newest good checkpoint. It checks every byte against its CRC-32, and OUT
    appears only when all of it is good and on disk. It uses a few buffers of 16 MiB, for any size of the
    checkpoint; dcp also holds one storage of a tensor in memory.

    A safetensors file has the values that are not tensors in its metadata, as JSON under `holdfast`; a value that JSON
    cannot hold is refused by its path. Each of several tied tensors gets its own copy, and the metadata names the ties.
    PerRank values are exported as in the checkpoint: one tensor of bytes for each rank. All formats but torch need the
    trainers' packages (the extra `trainer`).

    JSON: {"url", "step", "attempt", "format", "destination", "nbytes", "tensors", "tied": {name: name}}.
    """  # noqa: D301 - click needs this very character to leave the paragraph unwrapped
    if kind == "torch" and only is not None:
        raise ConfigError(
            f"--only {only} cannot be combined with --to torch, which copies the whole file; leave --only out, and let "
            "torch.load(OUT, mmap=True) read only the part that is used"
        )
    write = None if kind == "torch" else load_converter(f"export-{kind}")
    catalog, manifest = target.find_good("exported")
    store = catalog.store
    if kind == "dcp":
        path = check_folder_place(destination, ".metadata", force=force)
    else:
        path = check_file_place(destination, manifest.file.removesuffix(".pt") + _SUFFIX[kind], force=force)
    if write is None:
        pull_file(store, manifest, path, quiet=as_json)
        done = ExportResult(manifest.image_bytes, len(manifest.tensors), {})
    else:
        done = write(store, manifest, path, only=only, quiet=as_json)
    _print_result(store.url, manifest, kind, path, done, as_json=as_json)


def _print_result(
    url: str, manifest: Manifest, kind: str, path: Path, done: ExportResult, *, as_json: bool
) -> None:
    if as_json:
        names = {"url": url, "step": manifest.step, "attempt": manifest.attempt, "format": kind}
        print_json({**names, "destination": str(path), **done._asdict()})
        return
    print_line(
        f"{path}: step {manifest.step} as {kind}, {done.tensors} tensors, {done.nbytes} bytes, all checked"
    )
    for name, other in list(done.tied.items())[:_TIED_SHOWN]:
        print_line(f"  {name} is tied to {other}: the file has a copy of each")
    if len(done.tied) > _TIED_SHOWN:
        print_line(f"  and {len(done.tied) - _TIED_SHOWN} more are tied")
