"""The real `holdfast` command over a real directory, where torch cannot be imported."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.image.manifest import Manifest
from tests.support.blocked import environment_without
from tests.support.checkpoints import write_torch_run

HOLDFAST = Path(sys.executable).with_name("holdfast")
STATE = {
    10: {
        "model/weight": torch.arange(5000.0),
        "model/bias": torch.arange(7.0),
        "optimizer/moment": torch.ones(3000),
    },
    20: {
        "model/weight": torch.arange(5000.0) * 2,
        "model/bias": torch.zeros(7),
        "optimizer/moment": torch.ones(3000),
    },
}


@pytest.fixture(name="run_dir")
def _run_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    write_torch_run(directory, STATE)
    return directory


def holdfast(*arguments: object, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [str(HOLDFAST), *map(str, arguments)]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )


@pytest.fixture(name="bare")
def _bare(tmp_path: Path) -> dict[str, str]:
    """An environment without torch and MPI, seen to be so."""
    env = environment_without(tmp_path / "blocked", ("torch", "mpi4py"))
    for package in ("torch", "mpi4py"):
        seen = subprocess.run(
            [sys.executable, "-c", f"import {package}"], env=env, capture_output=True, check=False
        )
        assert seen.returncode == 1
    return env


def flip(run_dir: Path, step: int, tensor: str) -> int:
    """Flip one bit in the middle of a tensor's bytes; returns where."""
    manifest = Manifest.from_bytes((run_dir / f"step-{step:09d}.json").read_bytes(), source="test")
    entry = manifest.entries[next(record.entry for record in manifest.tensors if record.path == tensor)]
    path = run_dir / manifest.file
    data = bytearray(path.read_bytes())
    at = entry.offset + entry.nbytes // 2
    data[at] ^= 0x10
    path.write_bytes(data)
    return at


def document(result: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(result.stdout)


def test_ls_lists_checkpoints_as_a_table_and_as_json(run_dir: Path, bare: dict[str, str]) -> None:
    result = holdfast("ls", run_dir, env=bare)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["STEP", "SIZE", "STATE", "AGE", "RANKS", "PROOF", "FILE"]
    assert [line.split()[0] for line in lines[2:]] == ["20", "10"]
    assert lines[2].endswith("step-000000020.pt")
    assert "\x1b" not in result.stdout
    assert max(map(len, lines)) <= 80
    found = document(holdfast("ls", run_dir, "--json", env=bare))
    assert [(c["step"], c["state"], c["file_bytes"]) for c in found["checkpoints"]] == [
        (step, "verified", (run_dir / f"step-{step:09d}.pt").stat().st_size) for step in (20, 10)
    ]


def test_inspect_shows_a_manifest_as_text_and_as_json(run_dir: Path, bare: dict[str, str]) -> None:
    result = holdfast("inspect", f"{run_dir}@10", env=bare)
    assert result.returncode == 0, result.stderr
    for text in ("10 (attempt 1)", "model/weight", "float32", "5000", "ranks.0.copy", "0.125 s"):
        assert text in result.stdout
    found = document(holdfast("inspect", f"{run_dir}@latest", "--json", env=bare))
    assert found["manifest"]["step"] == 20
    assert [tensor["path"] for tensor in found["manifest"]["tensors"]] == list(STATE[20])


def test_verify_good(run_dir: Path, bare: dict[str, str]) -> None:
    result = holdfast("verify", run_dir, "--all", env=bare)
    assert result.returncode == 0, result.stderr
    assert [line.split()[1] for line in result.stdout.splitlines()] == ["good,", "good,"]


def test_verify_names_the_damaged_tensor_and_exits_with_6(run_dir: Path, bare: dict[str, str]) -> None:
    at = flip(run_dir, 20, "optimizer/moment")
    result = holdfast("verify", run_dir, env=bare)
    assert result.returncode == 6
    assert "optimizer/moment" in result.stderr
    assert "model/weight" not in result.stderr + result.stdout
    assert "Traceback" not in result.stderr

    asked = holdfast("verify", run_dir, "--all", "--json", env=bare)
    assert asked.returncode == 6
    found = document(asked)
    assert [(c["step"], c["ok"]) for c in found["checkpoints"]] == [(20, False), (10, True)]
    chunk = found["checkpoints"][0]["damage"][0]
    assert chunk["tensors"] == ["optimizer/moment"]
    assert chunk["offset"] <= at < chunk["offset"] + chunk["nbytes"]

    assert holdfast("verify", f"{run_dir}@10", env=bare).returncode == 0


def test_pull_gives_a_file_that_torch_loads(run_dir: Path, bare: dict[str, str], tmp_path: Path) -> None:
    target = tmp_path / "pulled"
    target.mkdir()
    result = holdfast("pull", run_dir, target, env=bare)
    assert result.returncode == 0, result.stderr
    loaded = torch.load(target / "step-000000020.pt", weights_only=True)
    assert loaded.keys() == STATE[20].keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in STATE[20].items())
    assert [path.name for path in target.iterdir()] == ["step-000000020.pt"]


def test_pull_of_damaged_bytes_leaves_nothing(run_dir: Path, bare: dict[str, str], tmp_path: Path) -> None:
    flip(run_dir, 10, "model/weight")
    target = tmp_path / "pulled.pt"
    result = holdfast("pull", f"{run_dir}@10", target, env=bare)
    assert result.returncode == 6
    assert not list(tmp_path.glob("*pulled*"))


def test_pull_does_not_replace_unless_told(run_dir: Path, bare: dict[str, str], tmp_path: Path) -> None:
    target = tmp_path / "mine.pt"
    target.write_text("precious")
    result = holdfast("pull", run_dir, target, env=bare)
    assert result.returncode == 2
    assert "--force" in result.stderr
    assert target.read_text() == "precious"
    assert holdfast("pull", run_dir, target, "--force", env=bare).returncode == 0
    assert target.read_bytes() == (run_dir / "step-000000020.pt").read_bytes()


def test_export_without_torch_says_what_to_install(
    run_dir: Path, bare: dict[str, str], tmp_path: Path
) -> None:
    result = holdfast("export", run_dir, tmp_path / "x.pt", "--to", "torch", env=bare)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "x.pt").read_bytes() == (run_dir / "step-000000020.pt").read_bytes()
    result = holdfast("export", run_dir, tmp_path / "x.safetensors", "--to", "safetensors", env=bare)
    assert result.returncode == 2
    assert "torch is not installed; run: pip install 'torch>=" in result.stderr
    assert holdfast("import", "--help", env=bare).returncode == 0


def test_pull_shows_on_a_terminal_how_far_it_is(run_dir: Path, bare: dict[str, str], tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    command = [str(HOLDFAST), "pull", str(run_dir), str(tmp_path / "x.pt")]
    env = {**bare, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        said = b""
        with contextlib.suppress(OSError), open(ours, "rb", buffering=0) as terminal:  # noqa: PTH123 - EIO is its end
            while piece := terminal.read(4096):
                said += piece
        assert process.stdout is not None
        assert b"all checked" in process.stdout.read()
    assert b"step-000000020.pt" in said
    assert b"kB" in said or b"KiB" in said


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["ls", "{run}-nowhere"], 5, "nothing at this URL"),
        (["inspect", "{run}@15"], 5, "no step 15; near it: 10, 20"),
        (["verify", "{run}@10", "--all"], 2, "--all checks every step"),
        (["pull", "{run}", "{run}/no/such/place.pt"], 2, "does not exist"),
        (["ls", "{run}@10"], 2, "leave @10 out"),
        (["shake", "{run}"], 2, "No such command"),
    ],
)
def test_mistakes_are_told_without_a_traceback(
    arguments: list[str], exit_code: int, words: str, run_dir: Path, bare: dict[str, str]
) -> None:
    result = holdfast(*(argument.format(run=run_dir) for argument in arguments), env=bare)
    assert result.returncode == exit_code, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_an_error_with_json_is_a_document_too(run_dir: Path, bare: dict[str, str]) -> None:
    result = holdfast("pull", f"{run_dir}@11", "/nowhere/file.pt", "--json", env=bare)
    assert result.returncode == 5
    error = document(result)["error"]
    assert error["code"] == "missing"
    assert error["help"] in result.stderr


def test_a_reader_that_has_seen_enough_gets_no_complaint(run_dir: Path, bare: dict[str, str]) -> None:
    pipeline = f"'{HOLDFAST}' inspect '{run_dir}' --json | true; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", pipeline], env=bare, capture_output=True, text=True, check=False)
    assert result.stdout.strip() in ("0", "1")
    assert result.stderr == ""
