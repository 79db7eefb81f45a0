"""`holdfast init`: the lines for each kind of training loop, and the lines that start the job."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner

from holdfast.errors import ConfigError
from operator_side.commands.init import init
from operator_side.script_lines import Launcher, script_lines, start_lines
from tests.support.doc_commands import why_not
from tests.support.job import REPOSITORY


@pytest.mark.parametrize(
    ("source", "words", "noted"),
    [
        ("import torch\nfrom transformers import GPT2Model\n", "checkpointer.step(step)", "docs/data.md"),
        ("import lightning.pytorch as pl\n", "HoldfastEnvironment", "Lightning"),
        ("def main():\n    from pytorch_lightning import Trainer\n", "HoldfastEnvironment", "Lightning"),
        (
            "from transformers import (\n    AutoModel,\n    Trainer,\n)\n",
            "holdfast.restore(trainer)",
            "Trainer",
        ),
        ("from accelerate import Accelerator\n", "prepared(accelerator)", "Accelerate"),
    ],
)
def test_lines_are_those_of_the_imported_framework(source: str, words: str, noted: str) -> None:
    lines, note = script_lines(source, every=50)
    assert words in lines
    assert noted in note
    assert "every=50" in lines
    assert "100" not in lines
    modules = re.findall(r"^from (\S+) import", lines, re.MULTILINE)
    assert modules
    assert {module.partition(".")[0] for module in modules} == {"holdfast"}  # what docs/stability.md promises


@pytest.mark.parametrize(
    "source", ["", "import lightning", "from transformers import Trainer", "import accelerate"]
)
def test_each_block_is_python_below_a_numbered_place(source: str) -> None:
    lines, _ = script_lines(source, every=7)
    blocks = re.split(r"^# \((\d)\) .*\n", lines, flags=re.MULTILINE)
    assert blocks[0] == ""
    assert [int(number) for number in blocks[1::2]] == list(range(1, len(blocks) // 2 + 1))
    for block in blocks[2::2]:
        code = block.strip()
        if code.endswith(","):
            code = f"call({code})"
        elif code.endswith(":"):
            code += " pass"
        elif code.startswith("for "):
            code = f"while True:\n{textwrap.indent(code, '    ')}"
        ast.parse(code)


def test_command_prints_lines_and_start_and_writes_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    done = CliRunner().invoke(init, [str(script), "-n", "4", "--store", "/mnt/run"])
    assert done.exit_code == 0, done.output
    assert script.read_text() == "import torch\n"
    assert "checkpointer = Checkpointer(state, every=100)\n" in done.stdout
    assert (
        f"mpirun --with-ft ulfm -n 4 python {script} : -n 1 holdfast stager --store /mnt/run\n" in done.stdout
    )
    assert done.stderr.startswith("note: ")
    document = json.loads(CliRunner().invoke(init, [str(script), "--json"]).stdout)
    assert list(document) == ["by_hand", "notes", "start"]


def test_command_without_a_script_prints_the_lines_of_an_own_loop() -> None:
    done = CliRunner().invoke(init, [])
    assert done.exit_code == 0, done.output
    assert "# (2) in place of init_process_group" in done.stdout
    assert "python train.py" in done.stdout


def test_command_refuses_a_missing_script(tmp_path: Path) -> None:
    done = CliRunner().invoke(init, [str(tmp_path / "none.py")])
    assert isinstance(done.exception, ConfigError)


@pytest.mark.parametrize("launcher", list(Launcher))
def test_start_lines_parse_in_shells_and_in_holdfast(launcher: Launcher) -> None:
    lines = start_lines(launcher, "train.py", ranks=2, store="/mnt/run")
    assert lines
    for _, line in lines:
        assert subprocess.run(["bash", "-n", "-c", line], check=False).returncode == 0
        assert why_not(line.removeprefix("(umask 077 && ").removesuffix(")")) == "", line


@pytest.mark.parametrize("launcher", list(Launcher))
def test_start_lines_name_existing_files(launcher: Launcher) -> None:
    lines = start_lines(launcher, "train.py", ranks=2, store="/mnt/run")
    named = [name for texts in lines for text in texts for name in re.findall(r"infra/[\w/.-]+\w", text)]
    assert [name for name in named if not (REPOSITORY / name).is_file()] == []
    assert bool(named) == (launcher in {Launcher.KUBERNETES, Launcher.SKYPILOT, Launcher.SLURM})


@pytest.mark.parametrize("launcher", [Launcher.TORCHRUN, Launcher.KUBERNETES, Launcher.SKYPILOT])
def test_start_lines_name_the_options_for_several_machines(launcher: Launcher) -> None:
    where, line = start_lines(launcher, "train.py", ranks=2, store="/mnt/run")[-1]
    assert "torchrun" in line
    assert all(option in where for option in ("--nnodes", "--rdzv-backend", "--rdzv-endpoint"))
