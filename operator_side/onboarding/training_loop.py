"""Finds the training loop of a script, and what a checkpoint of it holds: reads its syntax, and runs nothing.

    innermost loop around `optimizer.step()` ─► its epochs ─► names of model, optimizer, schedulers, scaler, loader

All of them must be variables of one function (or of the module), because the lines to add refer to them by name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeGuard

_SCHEDULER_ENDINGS = (
    "LR",
    "Scheduler",
    "Restarts",
    "Plateau",
    "_schedule",
    "_scheduler",
    "_schedule_with_warmup",
)
_OPTIMIZERS = ("optim", "opt")
_WRAPPERS_OF_LOADERS = frozenset({"tqdm", "enumerate"})
_OTHER_LOOPS = {"lightning": "Lightning", "pytorch_lightning": "Lightning", "accelerate": "Accelerate"}

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module


class NoLoopFound(NamedTuple):
    """Why the lines cannot be put into the script."""

    reason: str


@dataclass(frozen=True, slots=True)
class TrainingLoop:
    """What was found.

    Attributes:
        scope: The function, or the module, with all of it.
        loop: The loop over steps or batches.
        epochs: The loop around it; None if there is none.
        state: Name in the checkpoint → variable, in order.
        process_group: The statement that calls `init_process_group`; None if there is none.
        loader: The call that makes the DataLoader of the loop; None if it was not found.
    """

    scope: Scope
    loop: ast.For
    epochs: ast.For | None
    state: dict[str, str]
    process_group: ast.Expr | None = None
    loader: ast.Call | None = None
    names: frozenset[str] = field(default_factory=frozenset)


def find_training_loop(module: ast.Module) -> TrainingLoop | NoLoopFound:
    """Find the loop, or say why there is none that can be changed by itself."""
    for tool in _imported(module):
        if tool in _OTHER_LOOPS:
            return NoLoopFound(
                f"the script trains with {_OTHER_LOOPS[tool]}, which has its own lines: docs/frameworks.md"
            )
    if _calls(module, "Checkpointer"):
        return NoLoopFound("the script has a Checkpointer already")
    found = [(scope, step, loops) for scope in _scopes(module) for step, loops in _steps_in(scope)]
    if not found:
        called = [str(line) for line in _lines_of_steps(module)]
        where = f" (it is called in line {', '.join(called)})" if called else ""
        return NoLoopFound(
            f"no loop calls optimizer.step() in the function that makes the model and the optimizer{where}"
        )
    scope, _, loops = found[-1]
    loop = loops[-1]
    steps = [step for _, step, _ in found]
    if any(others[-1] is not loop for _, _, others in found):
        lines = ", ".join(str(step.lineno) for step in steps)
        return NoLoopFound(f"there are several training loops (optimizer.step() in lines {lines})")
    if not isinstance(loop, ast.For):
        return NoLoopFound(f"the loop in line {loop.lineno} is a `while`")
    outer = loops[-2] if len(loops) > 1 else None
    if len(loops) > 2 or isinstance(outer, ast.While):
        return NoLoopFound(f"the loop in line {loop.lineno} is inside more than a loop over epochs")
    reason = _unusual_turns(loop, steps) or _uncounted(loop, outer)
    if reason:
        return NoLoopFound(reason)
    return TrainingLoop(
        scope,
        loop,
        outer,
        _state(scope, loop),
        _process_group(module),
        _loader_call(scope, loop),
        frozenset(_names(module)),
    )


def _unusual_turns(loop: ast.For, steps: Sequence[ast.stmt]) -> str:
    if any(step not in loop.body for step in steps) or loop.body[0].lineno == loop.lineno:
        return f"not every turn of the loop in line {loop.lineno} calls optimizer.step()"
    if any(isinstance(node, ast.Continue) for node in ast.walk(loop)):
        return f"a `continue` in the loop in line {loop.lineno} leaves out the end of a turn"
    return ""


def _uncounted(loop: ast.For, epochs: ast.For | None) -> str:
    """Why the steps of the loop have no numbers; empty if they have."""
    if epochs is None:
        if not _counts_from_zero(loop.iter) or not isinstance(loop.target, ast.Name):
            return f"the loop in line {loop.lineno} does not count steps by `for step in range(…)`"
        return ""
    if not _counts_from_zero(epochs.iter) or not isinstance(epochs.target, ast.Name):
        return f"the loop in line {epochs.lineno} does not count epochs by `for epoch in range(…)`"
    if loader_name(loop) is None:
        return f"the loop in line {loop.lineno} does not go over a loader that has a name"
    return ""


def loader_name(loop: ast.For) -> str | None:
    """The variable that the loop goes over: `loader` of `enumerate(loader)`; None if it is not a variable."""
    node = loop.iter
    while isinstance(node, ast.Call) and name_of(node.func) in _WRAPPERS_OF_LOADERS and len(node.args) == 1:
        node = node.args[0]
    return node.id if isinstance(node, ast.Name) else None


def name_of(node: ast.expr) -> str:
    """The last name of `a.b.c`; empty for what is none."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def statements(scope: Scope) -> Iterator[ast.stmt]:
    """The statements of a scope, in order, without those of functions inside it."""
    waiting: list[ast.stmt] = list(scope.body)
    while waiting:
        statement = waiting.pop(0)
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        waiting = [
            child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)
        ] + waiting


def _scopes(module: ast.Module) -> Iterator[Scope]:
    yield module
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _assigned(scope: Scope) -> dict[str, ast.Call]:
    """Variables that a call makes: `model = Net()`."""
    found = {}
    for statement in statements(scope):
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    found[target.id] = statement.value
    return found


def _optimizers(scope: Scope) -> dict[str, ast.Call]:
    """Variables made from the parameters of a model, and called as optimizers are or stepped."""
    return {
        name: call
        for name, call in _assigned(scope).items()
        if name.lower().startswith(_OPTIMIZERS) or _models_of(call)
    }


def _models_of(call: ast.Call) -> list[str]:
    """Names of the models whose parameters an optimizer is made with."""
    return list(
        dict.fromkeys(
            node.func.value.id
            for node in ast.walk(call)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in {"parameters", "named_parameters"}
            and isinstance(node.func.value, ast.Name)
        )
    )


def _steps(statement: ast.stmt, optimizers: Sequence[str]) -> bool:
    """Whether it is `optimizer.step()` or `scaler.step(optimizer)`."""
    if not (isinstance(statement, ast.Expr | ast.Assign) and isinstance(statement.value, ast.Call)):
        return False
    call = statement.value
    if not (isinstance(call.func, ast.Attribute) and call.func.attr == "step"):
        return False
    return name_of(call.func.value) in optimizers or any(name_of(one) in optimizers for one in call.args)


def _lines_of_steps(module: ast.Module) -> list[int]:
    """Where something that is called like an optimizer is stepped, whatever made it."""
    return sorted(
        node.lineno
        for node in ast.walk(module)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "step"
        and name_of(node.func.value).lower().startswith(_OPTIMIZERS)
    )


def _steps_in(scope: Scope) -> list[tuple[ast.stmt, list[ast.For | ast.While]]]:
    """Each `optimizer.step()` of the scope, and the loops around it, outermost first."""
    optimizers = list(_optimizers(scope))
    found: list[tuple[ast.stmt, list[ast.For | ast.While]]] = []

    def look(body: Sequence[ast.stmt | ast.ExceptHandler], loops: list[ast.For | ast.While]) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if loops and isinstance(node, ast.stmt) and _steps(node, optimizers):
                found.append((node, loops))
            inner = [*loops, node] if isinstance(node, ast.For | ast.While) else loops
            look([child for child in ast.iter_child_nodes(node) if _has_statements(child)], inner)

    look(scope.body, [])
    return found


def _has_statements(node: ast.AST) -> TypeGuard[ast.stmt | ast.ExceptHandler]:
    return isinstance(node, ast.stmt | ast.ExceptHandler)


def _state(scope: Scope, loop: ast.For) -> dict[str, str]:
    made = _assigned(scope)
    optimizers = {
        name: call
        for name, call in _optimizers(scope).items()
        if any(_steps(statement, [name]) for statement in ast.walk(loop) if isinstance(statement, ast.stmt))
    }
    models = list(dict.fromkeys(model for call in optimizers.values() for model in _models_of(call)))
    stepped = {
        name_of(node.func.value)
        for node in ast.walk(scope)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step"
    }
    schedulers = [
        name
        for name, call in made.items()
        if name in stepped and name not in optimizers and name_of(call.func).endswith(_SCHEDULER_ENDINGS)
    ]
    scalers = [name for name, call in made.items() if name_of(call.func) == "GradScaler"]
    found: dict[str, str] = {}
    for kind, names in (
        ("model", models),
        ("optimizer", list(optimizers)),
        ("scheduler", schedulers),
        ("scaler", scalers),
    ):
        # One of a kind has the name of its kind in the checkpoint, whatever the script calls it.
        found |= {kind: names[0]} if len(names) == 1 else {name: name for name in names}
    return found


def _names(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def _process_group(module: ast.Module) -> ast.Expr | None:
    calls = [
        node
        for node in ast.walk(module)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and name_of(node.value.func) == "init_process_group"
    ]
    return calls[0] if len(calls) == 1 else None


def _loader_call(scope: Scope, loop: ast.For) -> ast.Call | None:
    call = _assigned(scope).get(loader_name(loop) or "")
    return call if call is not None and name_of(call.func) == "DataLoader" else None


def _counts_from_zero(node: ast.expr) -> bool:
    """`range(n)` or `range(0, n)`, perhaps within `tqdm(…)`."""
    call = range_of(node)
    if call is None or call.keywords or not call.args:
        return False
    first = call.args[0]
    return len(call.args) == 1 or (
        len(call.args) == 2 and isinstance(first, ast.Constant) and first.value == 0
    )


def range_of(node: ast.expr) -> ast.Call | None:
    """The call of `range` in what a loop goes over."""
    if not isinstance(node, ast.Call):
        return None
    if name_of(node.func) == "range":
        return node
    return range_of(node.args[0]) if name_of(node.func) == "tqdm" and node.args else None


def _calls(module: ast.Module, name: str) -> bool:
    return any(isinstance(node, ast.Call) and name_of(node.func) == name for node in ast.walk(module))


def _imported(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module.partition(".")[0]
