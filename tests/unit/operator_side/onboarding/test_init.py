"""`holdfast init`: what is found in a script, what is changed, and what is left to people."""

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
from operator_side.commands.init import _LAUNCHERS, init
from operator_side.onboarding.script_edits import ScriptEdits, edits_of
from operator_side.onboarding.start_lines import Launcher, start_lines
from tests.support.doc_commands import why_not
from tests.support.job import REPOSITORY

STEPS = """
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl", timeout=None)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(1000):
        loss = model(next(batches))
        loss.backward()
        optimizer.step()
    """


def changed(source: str, **more: int) -> tuple[str, ScriptEdits]:
    """The script with the diff in it, by `patch`."""
    source = textwrap.dedent(source)
    edits = edits_of(source, "train.py", every=more.get("every", 100))
    assert edits.diff, edits.notes
    return _patched(source, edits.diff), edits


def _patched(source: str, diff: str) -> str:
    """What `patch` makes of it; a diff of this module has whole hunks, in order."""
    old, new, at = source.splitlines(), [], 0
    for line in diff.splitlines()[2:]:
        if line.startswith("@@"):
            begin = int(line.split()[1].split(",")[0][1:]) - 1
            new += old[at:begin]
            at = begin
        elif line.startswith("+"):
            new.append(line[1:])
        else:
            assert old[at] == line[1:], line
            new += [line[1:]] if line.startswith(" ") else []
            at += 1
    return "\n".join([*new, *old[at:]]) + "\n"


def test_a_loop_over_steps_begins_where_the_checkpoint_ends() -> None:
    text, edits = changed(STEPS, every=7)
    assert "for step in range(first, 1000):\n" in text
    assert '    "model": model,\n    "optimizer": optimizer,\n    "rng": PerRank(RngState()),\n}\n' in text
    assert "checkpointer = Checkpointer(state, every=7)\n" in text
    assert "    optimizer.step()\n    checkpointer.step(step)\ncheckpointer.close()" in text
    assert 'init_torch_distributed("nccl")\n' in text
    assert "init_process_group(" not in text
    assert any("timeout of init_process_group are left out" in note for note in edits.notes)
    assert any("docs/data.md" in note for note in edits.notes)


def test_names_that_the_script_has_are_not_taken() -> None:
    text, _ = changed(STEPS.replace("Net()", "Net(first=state)").replace("loss =", "state = first ="))
    assert "holdfast_state = {" in text
    assert "range(holdfast_first, 1000)" in text


EPOCHS = """
    import torch
    import torch.distributed as dist
    from torch.optim.lr_scheduler import OneCycleLR

    def main(options):
        dist.init_process_group(backend=options.backend)
        loader = torch.utils.data.DataLoader(
            data,
            batch_size=32,  # of a rank
            shuffle=False
        )
        net = Net()
        opt_g, opt_d = None, None
        opt_g = torch.optim.Adam(net.parameters())
        schedule = OneCycleLR(opt_g, 0.1, 100)
        scaler = torch.amp.GradScaler()
        # All of it.
        for epoch in tqdm(range(0, options.epochs), "epochs"):
            for i, (x, y) in enumerate(tqdm(loader)):
                with torch.autocast("cuda"):
                    loss = net(x, y)
                scaler.scale(loss).backward()
                scaler.step(opt_g)
                scaler.update()
            schedule.step()
        dist.destroy_process_group()
    """


def test_a_loop_over_epochs_passes_over_what_was_trained() -> None:
    text, _ = changed(EPOCHS)
    assert "init_torch_distributed(options.backend)\n" in text
    assert (
        '        "model": net,\n        "optimizer": opt_g,\n        "scheduler": schedule,\n'
        '        "scaler": scaler,\n' in text
    )
    assert "range(max(first - 1, 0) // len(loader), options.epochs)" in text
    assert (
        "        for i, (x, y) in enumerate(tqdm(loader)):\n"
        "            step = epoch * len(loader) + i\n"
        "            if step < first:\n"
        "                continue" in text
    )
    assert (
        "            scaler.update()\n            checkpointer.step(step)\n        schedule.step()\n" in text
    )
    assert "        schedule.step()\n    checkpointer.close()" in text
    assert "shuffle=False, generator=torch.Generator()\n" in text


def test_a_loop_without_a_number_gets_one() -> None:
    text, _ = changed(EPOCHS.replace("i, (x, y) in enumerate(tqdm(loader))", "x, y in loader"))
    assert "for step, (x, y) in enumerate(loader, epoch * len(loader)):\n" in text


def test_what_is_shuffled_by_chance_is_told() -> None:
    text, edits = changed(EPOCHS.replace("shuffle=False", "shuffle=True"))
    assert "generator" not in text
    assert any("shuffle draws another order after a restart" in note for note in edits.notes)


def test_variables_of_the_launcher_that_are_read_too_early_are_told() -> None:
    _, edits = changed('local = int(os.environ["LOCAL_RANK"])\n' + textwrap.dedent(STEPS))
    assert any(note.startswith("line 1: under mpirun") for note in edits.notes)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("for step in range(1000)", "while True", "is a `while`"),
        ("    optimizer.step()", "    if step % 4:\n            optimizer.step()", "not every turn"),
        ("range(1000)", "range(5, 1000)", "does not count steps"),
        ("range(1000)", "batches", "does not count steps"),
        ("optimizer.step()", "train_one(model)", "no loop calls optimizer.step() in"),
        ("loss.backward()", "if loss > 9: continue", "leaves out the end of a turn"),
        ("import torch\n", "import torch, lightning\n", "docs/frameworks.md"),
        ("model = Net()", "model = Checkpointer(Net())", "has a Checkpointer already"),
    ],
)
def test_what_cannot_be_changed_by_itself_is_left_to_people(old: str, new: str, why: str) -> None:
    source = textwrap.dedent(STEPS)
    assert old in source
    edits = edits_of(source.replace(old, new), "train.py", every=50)
    assert edits.diff == ""
    assert why in edits.notes[0]
    assert "every=50" in edits.by_hand
    ast.parse(edits.by_hand)


def test_a_loop_in_another_function_than_the_optimizer_is_named() -> None:
    source = """
        def train(model, loader, optimizer):
            for batch in loader:
                model(batch).backward()
                optimizer.step()

        def main():
            model = Net()
            optimizer = SGD(model.parameters())
            for epoch in range(3):
                train(model, loader, optimizer)
        """
    edits = edits_of(textwrap.dedent(source), "train.py", every=50)
    assert "makes the model and the optimizer (it is called in line 5)" in edits.notes[0]


def test_two_loops_are_not_guessed_between() -> None:
    source = textwrap.dedent(STEPS)
    loop = source[source.index("for step") :]
    edits = edits_of(source + loop, "train.py", every=50)
    assert "several training loops (optimizer.step() in lines 11, 15)" in edits.notes[0]


def test_parentheses_that_no_syntax_tree_has_are_no_broken_script() -> None:
    edits = edits_of(textwrap.dedent(EPOCHS).replace("enumerate(tqdm(loader))", "(loader)"), "t.py", every=9)
    assert edits.diff == ""
    assert "cannot change" in edits.notes[0]


def test_what_is_no_python_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a Python script"):
        edits_of("for in", "train.py", every=1)


def test_the_examples_and_the_tests_have_scripts_that_are_understood() -> None:
    root = Path(__file__).resolve().parents[4]
    edits = edits_of((root / "examples/train_gpt.py").read_text(), "train_gpt.py", every=100)
    assert "has a Checkpointer already" in edits.notes[0]


def test_the_command_prints_diff_and_start_and_writes_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(STEPS))
    done = CliRunner().invoke(init, [str(script), "-n", "4", "--store", "/mnt/run"])
    assert done.exit_code == 0, done.output
    assert script.read_text() == textwrap.dedent(STEPS)
    assert "+checkpointer = Checkpointer(state, every=100)\n" in done.stdout
    assert (
        f"mpirun --with-ft ulfm -n 4 python {script} : -n 1 holdfast stager --store /mnt/run\n" in done.stdout
    )
    assert "note: line 5:" in done.stderr
    document = json.loads(CliRunner().invoke(init, [str(script), "--json"]).stdout)
    assert list(document) == ["diff", "by_hand", "notes", "start"]
    assert document["diff"].startswith("--- a/")


def test_without_a_script_the_places_are_named() -> None:
    done = CliRunner().invoke(init, [])
    assert done.exit_code == 0, done.output
    assert "# in place of init_process_group" in done.stdout.replace(";", "\n#").replace("  #", "\n#")
    assert "python train.py" in done.stdout


def test_a_script_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(init, [str(tmp_path / "none.py")])
    assert isinstance(done.exception, ConfigError)


@pytest.mark.parametrize("launcher", list(Launcher))
def test_start_lines_are_what_shells_and_holdfast_take(launcher: Launcher) -> None:
    lines = start_lines(launcher, "train.py", ranks=2, store="/mnt/run")
    assert lines
    for _, line in lines:
        assert subprocess.run(["bash", "-n", "-c", line], check=False).returncode == 0
        assert why_not(line.removeprefix("(umask 077 && ").removesuffix(")")) == "", line


@pytest.mark.parametrize("launcher", list(Launcher))
def test_start_lines_name_files_that_are_there(launcher: Launcher) -> None:
    lines = start_lines(launcher, "train.py", ranks=2, store="/mnt/run")
    named = [name for texts in lines for text in texts for name in re.findall(r"infra/[\w/.-]+\w", text)]
    assert [name for name in named if not (REPOSITORY / name).is_file()] == []
    assert bool(named) == (launcher in {Launcher.KUBERNETES, Launcher.SKYPILOT, Launcher.SLURM})


@pytest.mark.parametrize("launcher", [Launcher.TORCHRUN, Launcher.KUBERNETES, Launcher.SKYPILOT])
def test_ranks_on_several_machines_are_one_job(launcher: Launcher) -> None:
    where, line = start_lines(launcher, "train.py", ranks=2, store="/mnt/run")[-1]
    assert "torchrun" in line
    assert all(option in where for option in ("--nnodes", "--rdzv-backend", "--rdzv-endpoint"))


def test_each_launcher_can_be_named() -> None:
    assert tuple(Launcher) == _LAUNCHERS
