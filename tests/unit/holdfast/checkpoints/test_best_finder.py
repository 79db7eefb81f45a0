"""The best checkpoint of a run, as `holdfast ls` and `holdfast pull --best` find it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from holdfast.checkpoints.best_finder import find_best
from holdfast.checkpoints.catalog import Catalog
from holdfast.errors import ConfigError, StoreMissing
from holdfast.image.best_rule import BestRule
from holdfast.image.manifest import State, manifest_name
from holdfast.store.posix import PosixStore
from operator_side.commands.ls import ls
from operator_side.commands.pull import pull
from tests.support.checkpoints import manifest_of, small_image

RULE = BestRule(metric="loss", mode="min")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A bad one is lower than all, a doubtful one lower than the good ones; the newest has no metric."""

    def add(step: int, **changes: Any) -> None:
        image = small_image(step + 1)
        manifest = manifest_of(image, step=step, **changes)
        (folder / manifest.file).write_bytes(image)
        (folder / manifest_name(manifest.file)).write_bytes(manifest.to_bytes())

    folder = tmp_path / "run"
    folder.mkdir()
    add(1, metrics={"loss": 0.1}, state=State.BAD)
    add(2, metrics={"loss": 0.2}, state=State.DURABLE, doubt="step 2 may be torn", best=RULE)
    add(3, metrics={"loss": 0.3, "acc": 0.9}, best=RULE)
    add(4, metrics={"loss": 0.4, "acc": 0.8})
    add(5, best=RULE)
    return folder


def test_find_best_takes_the_best_good_one(run: Path) -> None:
    catalog = Catalog(PosixStore(run))
    assert find_best(catalog, "loss").step == 3
    assert find_best(catalog, "loss", "max").step == 4
    assert find_best(catalog, "acc", "max").step == 3


def test_find_best_says_what_is_missing(run: Path) -> None:
    catalog = Catalog(PosixStore(run))
    with pytest.raises(StoreMissing, match=r"has the metric los; the metrics of this run are acc, loss\."):
        find_best(catalog, "los")
    with pytest.raises(ConfigError, match="lowest or the highest acc is best; give the mode"):
        find_best(catalog, "acc")


def test_ls_shows_metrics_and_the_best(run: Path) -> None:
    said = CliRunner().invoke(ls, [str(run)], catch_exceptions=False).stdout
    assert "METRICS" in said
    assert "loss 0.3  acc 0.9" in said
    assert "best loss (lowest): 0.3, step 3 of attempt 1" in said
    document = json.loads(CliRunner().invoke(ls, [str(run), "--json"], catch_exceptions=False).stdout)
    assert [one["step"] for one in document["checkpoints"] if one["is_best"]] == [3]
    assert document["checkpoints"][1]["metrics"] == {"loss": 0.4, "acc": 0.8}


def test_ls_of_a_run_without_metrics_has_no_column_for_them(tmp_path: Path) -> None:
    manifest = manifest_of(small_image(), step=1)
    (tmp_path / manifest_name(manifest.file)).write_bytes(manifest.to_bytes())
    said = CliRunner().invoke(ls, [str(tmp_path)], catch_exceptions=False).stdout
    assert "METRICS" not in said
    assert "best" not in said


def test_pull_copies_the_best(run: Path, tmp_path: Path) -> None:
    for arguments in (["--best", "loss"], ["--best", "acc", "--mode", "max"]):
        out = tmp_path / "best.pt"
        CliRunner().invoke(pull, [str(run), str(out), "--force", *arguments], catch_exceptions=False)
        assert out.read_bytes() == small_image(4)
    for wrong in ([f"{run}@4", "--best", "loss"], [str(run), "--mode", "min"]):
        with pytest.raises(ConfigError):
            CliRunner().invoke(pull, [wrong[0], str(out), *wrong[1:]], catch_exceptions=False)
