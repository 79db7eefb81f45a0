"""The lines that a script needs, as a diff. Pure: text in, text out.

import, init_torch_distributed, state and Checkpointer before the loop, the loop's first step, step(), close()
"""

from __future__ import annotations

import ast
import difflib
from typing import NamedTuple

from holdfast.errors import ConfigError
from operator_side.onboarding.training_loop import (
    NoLoopFound,
    TrainingLoop,
    find_training_loop,
    loader_name,
    name_of,
    range_of,
)

_KEPT_ARGUMENTS = frozenset({"backend"})
_LAUNCHER_VARIABLES = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
BY_HAND = """\
from holdfast import Checkpointer, PerRank, RngState, init_torch_distributed  # with the other imports

rank, ranks = init_torch_distributed("nccl")  # in place of init_process_group; "gloo" without GPUs

# before the training loop: all that must come back, by name
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": PerRank(RngState())}
checkpointer = Checkpointer(state, every=100)
first = checkpointer.restore()  # the step to run next; 0 in a new run

# in the loop, which begins at step `first`: after optimizer.step() and all else that changes the state
checkpointer.step(step)  # saves after every 100 steps

# after the loop
checkpointer.close()  # waits until the last checkpoint is durable
"""


class ScriptEdits(NamedTuple):
    """What is to be done to a script.

    Attributes:
        diff: A unified diff; empty if the loop was not found.
        by_hand: Lines to put into the script, with the places; empty if there is a diff.
        notes: What a person should look at, in sentences.
    """

    diff: str
    by_hand: str
    notes: list[str]


def edits_of(source: str, name: str, *, every: int) -> ScriptEdits:
    """The lines that holdfast needs in a script.

    Args:
        source: Text of the script.
        name: Its path, for the diff.
        every: Steps between two checkpoints.

    Raises:
        ConfigError: The text is not Python.
    """
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: expected a Python script: {error}") from error
    found = find_training_loop(module)
    if isinstance(found, NoLoopFound):
        return ScriptEdits("", BY_HAND.replace("100", str(every)), [f"no diff, because {found.reason}"])
    editor = _Editor(source, every)
    editor.edit(module, found)
    changed = editor.text()
    try:
        ast.parse(changed)
    except SyntaxError:  # parentheses around what a loop goes over are in no syntax tree
        reason = f"the loop in line {found.loop.lineno} is written in a way that this command cannot change"
        return ScriptEdits("", BY_HAND.replace("100", str(every)), [f"no diff, because {reason}"])
    name = name.lstrip("/")
    lines = difflib.unified_diff(
        source.splitlines(keepends=True), changed.splitlines(keepends=True), f"a/{name}", f"b/{name}"
    )
    return ScriptEdits("".join(lines), "", editor.notes)


class _Editor:
    """Collects changes of lines, and makes them from the last to the first.

    Of two insertions in one place the one that was added first stands first.
    """

    def __init__(self, source: str, every: int) -> None:
        self._lines = source.splitlines(keepends=True)
        if self._lines and not self._lines[-1].endswith("\n"):
            self._lines[-1] += "\n"
        self._every = every
        self._changes: list[tuple[int, int, int, str]] = []  # begin, end (lines from 0), order, text
        self.notes: list[str] = []

    def text(self) -> str:
        lines = list(self._lines)
        for begin, end, _, text in sorted(self._changes, reverse=True):
            lines[begin:end] = [text]
        return "".join(lines)

    def edit(self, module: ast.Module, found: TrainingLoop) -> None:
        imports = ["Checkpointer", "PerRank", "RngState"]
        if found.process_group is not None:
            imports.append("init_torch_distributed")
            self._join(found.process_group)
        else:
            self.notes.append(
                "no single call of init_process_group was found: call init_torch_distributed() of holdfast in its "
                "place, before anything else of torch.distributed"
            )
        self._look_at_variables(module, found)
        self._after(_last_import(module), f"from holdfast import {', '.join(imports)}\n")
        outer = found.epochs or found.loop
        indent = self._indent(outer)
        taken = found.names
        self._names = {name: _free(name, taken) for name in ("checkpointer", "first", "state", "step")}
        names = self._names
        pairs = "".join(f'{indent}    "{name}": {variable},\n' for name, variable in found.state.items())
        self._before(
            outer,
            f"{indent}{names['state']} = {{\n{pairs}"
            f'{indent}    "rng": PerRank(RngState()),\n{indent}}}\n'
            f"{indent}{names['checkpointer']} = Checkpointer({names['state']}, every={self._every})\n"
            f"{indent}{names['first']} = {names['checkpointer']}.restore()  # the step to run next; 0 in a new run\n",
        )
        step = self._count_steps(found)
        inside = self._indent(found.loop.body[0])
        self._after(found.loop.body[-1], f"{inside}{names['checkpointer']}.step({step})\n")
        self._after(
            outer,
            f"{indent}{names['checkpointer']}.close()  # waits until the last checkpoint is durable\n",
        )

    def _join(self, statement: ast.Expr) -> None:
        call = statement.value
        assert isinstance(call, ast.Call)
        given = [*call.args[:1], *(one.value for one in call.keywords if one.arg == "backend")]
        backend = [ast.get_source_segment("".join(self._lines), one) or "" for one in given]
        self._replace(statement, f"{self._indent(statement)}init_torch_distributed({', '.join(backend)})\n")
        lost = [one.arg or "**" for one in call.keywords if one.arg not in _KEPT_ARGUMENTS]
        if lost or len(call.args) > 1:
            self.notes.append(
                f"line {statement.lineno}: init_torch_distributed takes the backend alone; "
                f"{', '.join(lost) or 'the other arguments'} of init_process_group are left out"
            )

    def _count_steps(self, found: TrainingLoop) -> str:
        """Have the loop begin at the first step that was not saved. Returns the name of the step."""
        first, loop = self._names["first"], found.loop
        if found.epochs is None:
            self._begin_range_at(loop, first)
            assert isinstance(loop.target, ast.Name)
            self.notes.append(
                "what the loop reads its batches from is not in the state, so a restart reads from its beginning: "
                "docs/data.md has samplers that go on exactly"
            )
            return loop.target.id
        loader, step = loader_name(loop), self._names["step"]
        epoch = ast.unparse(found.epochs.target)
        # What the script does at the end of an epoch comes after the checkpoint of the epoch's last step.
        self._begin_range_at(found.epochs, f"max({first} - 1, 0) // len({loader})")
        inside = self._indent(loop.body[0])
        skip = f"{inside}if {step} < {first}:\n{inside}    continue  # before the checkpoint\n"
        if _is_enumerate(loop.iter) and isinstance(loop.target, ast.Tuple):
            number = ast.unparse(loop.target.elts[0])
            skip = f"{inside}{step} = {epoch} * len({loader}) + {number}\n{skip}"
        else:
            target = ast.unparse(loop.target)
            head = f"for {step}, {target} in enumerate({ast.unparse(loop.iter)}, {epoch} * len({loader}))"
            _, after = self._split_at_end(loop.iter)
            self._replace_lines(
                loop.lineno, loop.iter.end_lineno or loop.lineno, f"{self._indent(loop)}{head}{after}"
            )
        end = loop.iter.end_lineno or loop.lineno
        self._changes.append((end, end, len(self._changes), skip))
        self._own_generator(found)
        self.notes.append(
            "after a restart the loop reads the batches of the current epoch before the checkpoint, and passes over "
            "them; with ResumableSampler (docs/data.md) it reads none of them"
        )
        return step

    def _own_generator(self, found: TrainingLoop) -> None:
        """Beginning an epoch must not draw from the random numbers of the training: a restart begins one more."""
        call = found.loader
        if call is None or "torch" not in found.names:
            return
        given = {one.arg: one.value for one in call.keywords}
        shuffle = given.get("shuffle")
        if shuffle is not None and not (isinstance(shuffle, ast.Constant) and shuffle.value is False):
            self.notes.append(
                f"line {call.lineno}: shuffle draws another order after a restart; use a DistributedSampler with "
                "set_epoch, or ResumableSampler (docs/data.md)"
            )
        elif "generator" not in given:
            values = [*call.args, *(one.value for one in call.keywords)]
            last = max(
                values, key=lambda one: (one.end_lineno or 0, one.end_col_offset or 0), default=call.func
            )
            before, after = self._split_at_end(last)
            line = last.end_lineno or last.lineno
            self._replace_lines(line, line, f"{before}, generator=torch.Generator(){after}")

    def _begin_range_at(self, loop: ast.For, first: str) -> None:
        call = range_of(loop.iter)
        assert call is not None
        _, after = self._split_at_end(call.args[-1])
        line = call.args[-1].end_lineno or call.lineno
        begin = call.args[0] if len(call.args) > 1 else None
        text = self._lines[line - 1]
        column = len(text.encode()[: (begin or call.args[-1]).col_offset].decode())
        self._replace_lines(line, line, f"{text[:column]}{first}, {ast.unparse(call.args[-1])}{after}")

    def _split_at_end(self, node: ast.expr) -> tuple[str, str]:
        """The line in which it ends, up to there and from there; syntax trees count bytes."""
        assert node.end_lineno is not None
        line = self._lines[node.end_lineno - 1].encode()
        return line[: node.end_col_offset].decode(), line[node.end_col_offset :].decode()

    def _look_at_variables(self, module: ast.Module, found: TrainingLoop) -> None:
        joined = found.process_group.lineno if found.process_group is not None else 0
        early = sorted(
            {
                node.lineno
                for node in ast.walk(module)
                if isinstance(node, ast.Constant)
                and node.value in _LAUNCHER_VARIABLES
                and node.lineno < joined
            }
        )
        if early:
            self.notes.append(
                f"line {', '.join(map(str, early))}: under mpirun init_torch_distributed sets RANK, LOCAL_RANK and the "
                "like; read them after that call"
            )

    def _indent(self, statement: ast.stmt) -> str:
        return self._lines[statement.lineno - 1][: statement.col_offset]

    def _before(self, statement: ast.stmt, text: str) -> None:
        line = statement.lineno - 1
        while line and self._lines[line - 1].startswith(
            f"{self._indent(statement)}#"
        ):  # its comment stays with it
            line -= 1
        self._changes.append((line, line, len(self._changes), text))

    def _after(self, statement: ast.stmt | None, text: str) -> None:
        end = 0 if statement is None else statement.end_lineno or statement.lineno
        self._changes.append((end, end, len(self._changes), text))

    def _replace(self, statement: ast.stmt, text: str) -> None:
        self._replace_lines(statement.lineno, statement.end_lineno or statement.lineno, text)

    def _replace_lines(self, begin: int, end: int, text: str) -> None:
        self._changes.append((begin - 1, end, len(self._changes), text))


def _last_import(module: ast.Module) -> ast.stmt | None:
    imports = [one for one in module.body if isinstance(one, ast.Import | ast.ImportFrom)]
    if imports:
        return imports[-1]
    first = module.body[0] if module.body else None
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return first if is_docstring else None


def _is_enumerate(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and name_of(node.func) == "enumerate" and len(node.args) == 1


def _free(name: str, taken: frozenset[str]) -> str:
    while name in taken:
        name = f"holdfast_{name}"
    return name
