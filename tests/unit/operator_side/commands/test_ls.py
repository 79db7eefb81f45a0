"""`holdfast ls` of a long run: rows appear while manifests are read, in aligned columns."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from holdfast.checkpoints.branches import Branches
from holdfast.checkpoints.catalog import Catalog, CatalogItem
from holdfast.image.manifest import manifest_name
from operator_side.commands.ls import _print, ls
from tests.support.checkpoints import add_small, manifest_of, small_image
from tests.support.memory_store import MemoryStore

_STEPS = 500


def test_rows_come_before_the_last_manifest_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    store, printed = MemoryStore(), dict[int, int]()
    for step in range(_STEPS):
        add_small(store, step)

    def items() -> Iterator[CatalogItem]:
        lines = 0
        for number, item in enumerate(Catalog(store).newest_first()):
            lines += capsys.readouterr().out.count("\n")
            printed[number] = lines
            yield item

    _print(store.url, items(), Branches(), "")
    assert printed[39] == 0
    assert printed[40] == 42, "the heading, a rule, and the first forty"
    assert printed[_STEPS - 1] >= 240


def test_rows_of_all_pages_stand_below_each_other_under_one_heading(tmp_path: Path) -> None:
    image = small_image()
    for step in range(_STEPS):
        # The newest is good, so that its shorter state sets the width of the first rows.
        manifest = manifest_of(image, step=step)
        (tmp_path / manifest.file).write_bytes(image if step else b"")
        (tmp_path / manifest_name(manifest.file)).write_bytes(manifest.to_bytes())
    done = CliRunner().invoke(ls, [str(tmp_path)], catch_exceptions=False)
    lines = done.stdout.splitlines()
    rows = [line for line in lines if re.match(r" *\d", line)]
    assert sum("STATE" in line for line in lines) == 1
    assert [int(row.split()[0]) for row in rows] == list(range(_STEPS - 1, -1, -1))
    assert len({row.index("step-") for row in rows}) == 1
    assert "step-000000000.pt: expected" in lines[-1]


def test_the_json_document_has_all_checkpoints(tmp_path: Path) -> None:
    for step in range(3):
        manifest = manifest_of(small_image(), step=step)
        (tmp_path / manifest_name(manifest.file)).write_bytes(manifest.to_bytes())
    done = CliRunner().invoke(ls, [str(tmp_path), "--json"], catch_exceptions=False)
    assert [one["step"] for one in json.loads(done.stdout)["checkpoints"]] == [2, 1, 0]
    assert done.stderr == "", "stderr is no terminal, so no progress is shown"
