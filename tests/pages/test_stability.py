"""docs/stability.md and docs/api/ list exactly the public names, with the source's versions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import trainer_side
from holdfast import errors
from holdfast.checkpoints import lease
from holdfast.checkpoints.branches import Rewind
from holdfast.command.cli import cli
from holdfast.image import proof_record
from holdfast.image.manifest import Manifest
from holdfast.image.slices import SliceSeal
from holdfast.ring import doorbell as ipc
from holdfast.ring import journal
from holdfast.wire import frames as wire
from trainer_side.convert import safetensors_in
from trainer_side.tiers import slot_format

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORKS = ROOT / "trainer_side" / "frameworks"
INTERNAL = {"__init__", "missing"}
GIVEN_BACK = {
    "trainer_side.checkpointer.Stats",
    "trainer_side.restore.restore_attempt.Restored",
    "holdfast.notices.notice.Notice",
}


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")


def rows(page: str, heading: str) -> Iterator[list[str]]:
    """Yield the cells of the first table below a heading, without code marks."""
    below = page.partition(f"# {heading}\n")[2].partition("\n#")[0]
    table = re.findall(r"(?:^\|.*\n)+", below, re.MULTILINE)[0]
    for line in table.splitlines()[2:]:
        yield [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]


def public() -> dict[str, set[str]]:
    """Return module → names. Modules for frameworks are parsed, as an import would load the framework."""
    found = {"trainer_side": set(trainer_side.__all__), "holdfast.errors": set(errors.__all__)}
    for path in FRAMEWORKS.glob("*.py"):
        if path.stem not in INTERNAL:
            found[f"trainer_side.frameworks.{path.stem}"] = exported(path)
    return found


def exported(path: Path) -> set[str]:
    """Return the names in a module's `__all__`, without importing it."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return set(ast.literal_eval(value))
    raise AssertionError(f"{path}: no __all__")


def test_the_names_are_those_of_the_modules(page: str) -> None:
    listed = {module: set(names.split(", ")) for module, names in rows(page, "Python")}
    assert listed == public()


def test_each_of_them_is_in_the_reference() -> None:
    shown = [
        name
        for path in (ROOT / "docs" / "api").glob("*.md")
        for name in re.findall(r"^::: (\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    names = {f"{module}.{name}" for module, names in public().items() for name in names}
    assert set(shown) == names | GIVEN_BACK
    assert len(shown) == len(set(shown))


def test_codes_are_those_of_the_classes(page: str) -> None:
    listed = {name: (code, int(exit_code)) for name, code, exit_code in rows(page, "Errors and exit codes")}
    classes = [getattr(errors, name) for name in errors.__all__ if name != "HoldfastError"]
    assert listed == {kind.__name__: (kind.code, kind.exit_code) for kind in classes}


def test_documents_are_those_of_the_commands_that_take_json(page: str) -> None:
    section = page.partition("\n### Command line and settings\n")[2].partition("\n#")[0]
    assert set(re.findall(r"`(holdfast [a-z ]+)`", section)) == set(with_json("holdfast", cli))


def with_json(path: str, command: click.Command) -> Iterator[str]:
    if any("--json" in parameter.opts for parameter in command.params):
        yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from with_json(f"{path} {name}", found)


def test_versions_are_those_of_the_source(page: str) -> None:
    assert {what: version for what, version, _ in rows(page, "Files, messages, metrics")} == {
        "portable file and manifest": Manifest.model_fields["format"].default,
        "records of rewinds": Rewind.model_fields["format"].default,
        "seal of a slice": SliceSeal.model_fields["format"].default,
        "proof of a resume": proof_record.FORMAT,
        "claims": lease._LeaseRecord.model_fields["format"].default,
        "values in an exported safetensors file": safetensors_in.VALUES_FORMAT,
        "slot file of a local tier": str(slot_format.VERSION),
        "wire": str(wire.VERSION),
        "socket of the flusher": str(ipc.VERSION),
        "journal of the ring": f"{journal._VERSION}, {journal._VERSION_MORE}",
    }
