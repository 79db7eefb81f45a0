"""`holdfast diff A B`: what differs between two checkpoints, by tensor, with numbers.

trainer_side/convert, which has torch, compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from holdfast.command.converters import ComparedFile, StateComparison, TensorDifference, load_converter
from holdfast.command.examples import examples
from holdfast.command.output import console, escape_controls, json_option, print_json, print_line, table
from operator_side.commands.options import count, exit_codes, text
from operator_side.commands.target import TARGET, Target

_LIMIT = 20
_DIFFER_EXIT_CODE = 1  # as diff(1)


@click.command(
    short_help="Say what differs between two checkpoints, by tensor.",
    epilog=exit_codes("0 no difference", "1 different; the output says where")
    + examples(
        "holdfast diff s3://bucket/run@1000 s3://bucket/run@2000 --only model",
        "holdfast diff /mnt/run@1000 /mnt/other-run@1000",
        "holdfast diff /mnt/run@1000 step-1000.pt --json | jq '.tensors[0]'",
    ),
)
@click.argument("first", metavar="A", type=TARGET)
@click.argument("second", metavar="B", type=TARGET)
@text("--only", "Compare only the part of the states with this name, such as `model`.", metavar="NAME")
@count("--limit", "Number of rows of each list that are shown; --json has all.", _LIMIT, least=0)
@json_option
def diff(as_json: bool, first: Target, second: Target, only: str | None, limit: int) -> None:
    """Say what differs between A and B, each a checkpoint of a run (URL[@STEP]) or a file of torch.save or safetensors.

    \b
    DIFFER     elements whose bits differ, and their share
    MAX ABS    the largest difference between two finite elements
    MEAN ABS   the mean difference of all finite elements
    RELATIVE   norm of the difference, relative to the larger norm of A's and B's tensor
    NOT FINITE NaN and infinite elements in A and in B

    Tensors of another dtype or shape come first, then those with the largest relative difference. Other values (steps,
    learning rates, states of random numbers) follow, long ones with a digest.

    Two tensors are equal, and not read, if both checkpoints are verified and their manifests have the same size and
    CRC-32 for them. All others are read, one tensor of each side at a time, and those of runs are checked against their
    CRC-32. The command needs the trainers' packages (the extra `trainer`).

    JSON: {"a", "b", "equal", "only_a": [path], "only_b": [path], "tensors": [{"path", "dtypes": [a, b], "shapes":
    [a, b], "elements", "differing", "max_abs", "mean_abs", "max_relative", "relative", "nonfinite": [a, b]}], "values":
    [{"path", "a", "b"}], "equal_tensors", "unread", "equal_values"}. Numbers are null if the
    shapes differ, or torch cannot compute with the dtype. unread counts the tensors that are equal by their CRC-32.
    """  # noqa: D301 - click needs this very character to leave the paragraph unwrapped
    compare = load_converter("diff")
    (a, name_a), (b, name_b) = _open(first), _open(second)
    found: StateComparison = compare(a, b, only=only, quiet=as_json)
    if as_json:
        print_json(_document(name_a, name_b, found))
    else:
        _print(name_a, name_b, found, limit)
    if not found.is_equal:
        click.get_current_context().exit(_DIFFER_EXIT_CODE)


def _open(target: Target) -> tuple[ComparedFile, str]:
    """Open one side; return it and its name for messages."""
    if target.step is None and Path(target.url).is_file():
        return ComparedFile(path=Path(target.url)), target.url
    catalog, manifest = target.find_good("compared")
    name = f"{catalog.store.url}@{manifest.step} (attempt {manifest.attempt}, {manifest.display_state})"
    return ComparedFile(store=catalog.store, manifest=manifest), name


def _document(a: str, b: str, found: StateComparison) -> dict[str, Any]:
    values = [{"path": path, "a": first, "b": second} for path, first, second in found.values]
    tensors = [one._asdict() for one in found.tensors]
    return {"a": a, "b": b, "equal": found.is_equal, **found._asdict(), "tensors": tensors, "values": values}


def _print(a: str, b: str, found: StateComparison, limit: int) -> None:
    print_line(f"A: {a}")
    print_line(f"B: {b}")
    for name, paths in (("A", found.only_a), ("B", found.only_b)):
        if paths:
            print_line(f"\nonly in {name}: {len(paths)}")
            _list(paths, limit)
    if found.tensors:
        print_line(f"\ndiffering tensors: {len(found.tensors)}")
        _print_tensors(found.tensors, limit)
    if found.values:
        print_line(f"\ndiffering values: {len(found.values)}")
        _list([f"{path}: {first} -> {second}" for path, first, second in found.values], limit)
    unread = f" ({found.unread} by their CRC-32, not read)" if found.unread else ""
    print_line(f"\nequal: {found.equal_tensors} tensors{unread}, {found.equal_values} other values")


def _print_tensors(tensors: Sequence[TensorDifference], limit: int) -> None:
    numbers = ("DIFFER", "MAX ABS", "MEAN ABS", "RELATIVE", "NOT FINITE")
    rows = table("TENSOR", *numbers, right=numbers)
    rows.columns[0].no_wrap = False
    rows.columns[0].overflow = "fold"
    for one in tensors[:limit]:
        rows.add_row(escape_controls(one.path + _type_changes(one)).replace("[", r"\["), *_cells(one))
    console().print(rows)
    _show_remainder(len(tensors), limit)


def _type_changes(one: TensorDifference) -> str:
    pairs = (one.dtypes, tuple(map(list, one.shapes)))
    return "".join(f" {before} -> {after}" for before, after in pairs if before != after)


def _cells(one: TensorDifference) -> tuple[str, ...]:
    if one.elements is None or one.differing is None:
        return ("-",) * 5
    share = f"{one.differing} ({one.differing / max(1, one.elements):.1%})"
    numbers = (
        "-" if value is None else f"{value:.3g}" for value in (one.max_abs, one.mean_abs, one.relative)
    )
    broken = "-" if one.nonfinite is None else f"{one.nonfinite[0]} / {one.nonfinite[1]}"
    return (share, *numbers, broken)


def _list(lines: Sequence[str], limit: int) -> None:
    for line in lines[:limit]:
        print_line(f"  {line}")
    _show_remainder(len(lines), limit)


def _show_remainder(count: int, limit: int) -> None:
    if count > limit:
        print_line(f"  and {count - limit} more (--limit)")
