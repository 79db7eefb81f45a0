from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from holdfast.errors import ConfigError
from operator_side.commands.run import run
from operator_side.script_lines import lines_for_several_machines

_OPTIONS = ["--launcher", "torchrun", "-n", "2"]


def refusal(folder: Path, *options: str) -> str:
    line = [*_OPTIONS, "--store", str(folder / "store"), "--logs", str(folder / "logs"), *options]
    done = CliRunner().invoke(run, [*line, "--", "train.py"])
    assert isinstance(done.exception, ConfigError), done
    assert not (folder / "store").exists()
    return str(done.exception)


@pytest.mark.parametrize(
    "options",
    [
        ("--hosts", "hosts"),
        ("--slurm",),
        ("--cluster", "file"),
        ("--no-ulfm",),
        ("--mpirun-options", "--verbose"),
        ("--stall-seconds-max", "3"),
        ("--min-ranks", "1"),
    ],
)
def test_run_refuses_options_of_mpirun_with_torchrun(tmp_path: Path, options: tuple[str, ...]) -> None:
    assert f"{options[0]}" in refusal(tmp_path, *options)
    assert "with --launcher torchrun" in refusal(tmp_path, *options)


def test_run_refuses_a_stager_for_several_machines_with_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--set listen=0.0.0.0:1" in refusal(tmp_path, "--set", "listen=0.0.0.0:1")
    monkeypatch.setenv("HOLDFAST_STAGER", "stager-0:29411")
    assert "got 'stager-0:29411'" in refusal(tmp_path)


def test_lines_for_several_machines_have_the_address_the_key_and_the_script() -> None:
    lines = lines_for_several_machines(
        ["train.py", "--name", "a b"], ranks=8, restarts_max=3, store="s3://bucket/run", host="node-0"
    )
    stager, ranks = (line for _, line in lines[2:])
    assert stager == "holdfast stager --store s3://bucket/run --listen 0.0.0.0:29411 --key-file key"
    assert ranks == (
        "HOLDFAST_STAGER=node-0:29411 HOLDFAST_KEY_FILE=key holdfast rank -- torchrun --nnodes NODES "
        "--nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint NODE:29400 --max-restarts 3 train.py --name 'a b'"
    )
    local = lines_for_several_machines(["train.py"], ranks=8, restarts_max=3, store="/mnt/run", host="node-0")
    assert "/mnt/run must be the same directory on every machine" in local[2][0]
