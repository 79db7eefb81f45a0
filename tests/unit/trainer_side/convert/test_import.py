"""Foreign files become checkpoints: every value comes back, and nothing unintended gets into a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import save_file

from holdfast.checkpoints.catalog import Catalog
from holdfast.checkpoints.lease import Lease
from holdfast.checkpoints.verification import verify_file
from holdfast.command import cli
from holdfast.errors import ConfigError, DamageError, StateError
from holdfast.store import open_store
from tests.support.restoring import publish
from tests.unit.trainer_side.convert.test_safetensors_out import training_state
from tests.unit.trainer_side.restore.test_restore import Run, assert_same, bring_back
from tests.unit.trainer_side.state.test_skeleton import _same, _states
from trainer_side.convert.import_source import open_import_source
from trainer_side.convert.safetensors_out import write_safetensors
from trainer_side.state.per_rank import PerRank
from trainer_side.state.rng import RngState

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(name="run")
def _run(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["import", *map(str, arguments)])
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return run


def load(root: Path, step: int) -> Any:
    return torch.load(root / f"step-{step:09d}.pt", weights_only=True)


def saved_by_torch(path: Path, state: Any) -> Path:
    torch.save(state, path)
    return path


def test_a_file_saved_by_torch_is_restored_and_goes_on_the_same(tmp_path: Path, run: Command) -> None:
    before = Run(1, steps=3)
    file = saved_by_torch(tmp_path / "old.pt", before.tree())
    code, out, err = run(file, tmp_path / "run", "--step", 41, "--json")
    assert code == 0, err
    said = json.loads(out)
    assert (said["step"], said["attempt"], said["state"], said["format"]) == (41, 1, "verified", "torch")
    assert said["names"] == list(before.tree())
    fresh = Run(2)
    restored = bring_back(fresh, tmp_path / "run")
    assert (restored.step, restored.attempt) == (41, 1)
    assert_same(fresh.tree(), before.tree())
    assert fresh.loss() == before.loss()
    store = open_store(str(tmp_path / "run"))
    manifest = Catalog(store).get()
    assert manifest.record["imported"] == {"from": "old.pt", "format": "torch"}
    assert verify_file(store, manifest).ok
    claim = Lease.acquire(store)
    assert claim.attempt == 2, "the next job is a later attempt, and need not wait"
    claim.release()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_states())
def test_any_state_is_taken_as_it_is(
    tmp_path_factory: pytest.TempPathFactory, run: Command, state: Any
) -> None:
    root = tmp_path_factory.mktemp("any")
    file = saved_by_torch(root / "old.pt", {"all": state})
    code, _, err = run(file, root / "run", "--step", 0)
    assert code == 0, err
    _same(load(root / "run", 0), torch.load(file, weights_only=True))


def test_several_chunks(tmp_path: Path, run: Command) -> None:
    state = {"a": torch.randn(3 << 20), "b": torch.arange(6 << 20, dtype=torch.int64), "c": torch.zeros(0)}
    assert run(saved_by_torch(tmp_path / "old.pt", state), tmp_path / "run", "--step", 5)[0] == 0
    found = load(tmp_path / "run", 5)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    subprocess.run(
        [sys.executable, "-m", "zipfile", "-t", tmp_path / "run" / "step-000000005.pt"], check=True
    )


def test_an_exported_state_comes_back_the_same(tmp_path: Path, run: Command) -> None:
    state = training_state()
    manifest = publish(tmp_path / "run", 3, state)
    store = open_store(str(tmp_path / "run"))
    whole, part = tmp_path / "whole.safetensors", tmp_path / "part.safetensors"
    write_safetensors(store, manifest, whole, only=None, quiet=True)
    write_safetensors(store, manifest, part, only="model", quiet=True)
    assert run(whole, tmp_path / "again", "--step", 3)[0] == 0
    found = load(tmp_path / "again", 3)
    _same(found, torch.load(tmp_path / "run" / manifest.file, weights_only=True))
    tied = found["model"]
    assert tied["0.weight"].data_ptr() == tied["1.weight"].data_ptr()
    assert run(part, tmp_path / "model-alone", "--step", 3)[0] == 0
    _same(load(tmp_path / "model-alone", 3), {"model": found["model"]})


def test_safetensors_of_others_go_under_a_name(tmp_path: Path, run: Command) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    file = tmp_path / "model.safetensors"
    save_file(model.state_dict(), file)
    assert run(file, tmp_path / "run", "--step", 0, "--under", "model")[0] == 0
    other = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    bring_back({"model": other}, tmp_path / "run")
    assert_same(other.state_dict(), model.state_dict())


def test_names_are_changed_and_left_out(tmp_path: Path, run: Command) -> None:
    state = {"model_state_dict": {"w": torch.ones(2)}, "optimizer": {"lr": 0.1}, "rng": [1]}
    file = saved_by_torch(tmp_path / "old.pt", state)
    more = ("--rename", "model_state_dict=model", "--drop", "rng")
    assert run(file, tmp_path / "run", "--step", 1, *more)[0] == 0
    assert list(load(tmp_path / "run", 1)) == ["model", "optimizer"]
    code, _, err = run(file, tmp_path / "other", "--step", 1, "--drop", "seed")
    assert code == 2
    assert "no 'seed' in it; it has 'model_state_dict', 'optimizer', 'rng'" in err
    assert run(file, tmp_path / "other", "--step", 1, "--rename", "rng=optimizer")[0] == 2
    assert run(file, tmp_path / "other", "--step", 1, "--rename", "rng")[0] == 2
    assert not (tmp_path / "other").exists()


class Custom:
    pass


@pytest.mark.parametrize(
    ("state", "code", "words"),
    [
        ({"model": Custom()}, 3, "weights_only=True) refuses"),
        (torch.ones(2), 3, "holds a Tensor, expected a dict of names; --under model"),
        ({"a/b": torch.ones(1)}, 3, "'a/b' cannot stand at the top"),
        ({}, 2, "no name is left"),
        ({"model": torch.ones(2).to_sparse()}, 3, "model is"),
    ],
)
def test_an_impossible_state_is_refused_before_the_run_is_touched(
    state: Any, code: int, words: str, tmp_path: Path, run: Command
) -> None:
    found, _, err = run(saved_by_torch(tmp_path / "old.pt", state), tmp_path / "run", "--step", 1)
    assert found == code, err
    assert words in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04 and nothing else",
        b"\x80\x02 an old pickle",
        (1 << 40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{]",
        (58).to_bytes(8, "little")
        + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}    '
        + bytes(8),
        (59).to_bytes(8, "little")
        + b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[8,4]}}     '
        + bytes(8),
        (54).to_bytes(8, "little") + b'{"a":{"dtype":"Q8","shape":[],"data_offsets":[0,0]}}  ',
        (42).to_bytes(8, "little") + b'{"__metadata__":{"holdfast":"{\\"a\\":1}"}}  ',
    ],
)
def test_a_file_that_is_none_is_damaged(content: bytes, tmp_path: Path, run: Command) -> None:
    (tmp_path / "file").write_bytes(content)
    code, _, err = run(tmp_path / "file", tmp_path / "run", "--step", 1)
    assert code == 6, err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_a_run_with_checkpoints_or_with_a_writer_is_left_alone(tmp_path: Path, run: Command) -> None:
    publish(tmp_path / "run", 9, {"x": torch.ones(3)})
    file = saved_by_torch(tmp_path / "old.pt", {"x": torch.zeros(3)})
    code, _, err = run(file, tmp_path / "run", "--step", 4)
    assert code == 2
    assert "this run has checkpoints already, the newest of step 9" in err
    store = open_store(str(tmp_path / "run"))
    claim = Lease.acquire(store)
    code, _, err = run(file, tmp_path / "run", "--step", 4, "--force")
    assert code == 8, err
    claim.release()
    assert run(file, tmp_path / "run", "--step", 4, "--force")[0] == 0
    newest = Catalog(store).get()
    assert newest.step == 4, "of a later attempt, and so the newest"


def test_values_that_the_file_lacks_stay_only_where_the_script_says_so(tmp_path: Path) -> None:
    publish(tmp_path, 3, {"x": torch.ones(4)})
    target, seen = torch.zeros(4), PerRank(RngState())
    with pytest.raises(StateError, match=r"has no 'rng'; it has 'x'.*may_lack=\['rng'\]"):
        bring_back({"x": target, "rng": seen}, tmp_path)
    assert torch.equal(target, torch.zeros(4)), "nothing was loaded"
    before = torch.get_rng_state()
    restored = bring_back({"x": target, "rng": seen, "n": 5}, tmp_path, may_lack=("rng", "n"))
    assert torch.equal(target, torch.ones(4))
    assert torch.equal(torch.get_rng_state(), before)
    assert restored.values == {}


def test_values_that_may_lack_are_restored_where_the_checkpoint_has_them(tmp_path: Path) -> None:
    publish(tmp_path, 3, {"x": torch.ones(4), "n": 6})
    target = torch.zeros(4)
    restored = bring_back({"x": target, "n": 5}, tmp_path, may_lack=("n", "x"))
    assert torch.equal(target, torch.ones(4))
    assert restored.values == {"n": 6}


def test_a_path_that_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="expected a file or a directory"):
            open_import_source(path, under=None, renamed={}, dropped=[])


def test_entries_that_share_their_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "shared.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data/0", bytes(1 << 16))
        archive.filelist *= 64  # the directory names the same bytes again and again
    with pytest.raises(DamageError, match="its entries say"):
        open_import_source(path, under=None, renamed={}, dropped=[])
