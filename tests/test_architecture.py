"""The arrows of the design: who may import whom, and imports that must work without an optional package."""

from __future__ import annotations

import ast
import fnmatch
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.blocked import environment_without
from tests.support.parsed import parsed

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("holdfast", "trainer_side", "stager", "flusher", "operator_side")
# Imported by scripts: names the roles; our own code imports from it only `__version__`.
FACE = ROOT / "holdfast/__init__.py"
INTEGRATIONS = ROOT / "holdfast/integrations"

# Imports every module of the packages named as arguments, except what would run on import.
IMPORT_ALL = """
import importlib, pkgutil, sys
for package in sys.argv[1:]:
    path = importlib.import_module(package).__path__
    for module in pkgutil.walk_packages(path, package + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
"""


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def python(code: str, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def imports(path: Path) -> Iterator[str]:
    """Full names of all imports of a file, anywhere in it; `from a import b` gives `a.b`."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules(root: Path, paths: Sequence[Path]) -> dict[str, set[str]]:
    """Each module with its imports among the others, including those inside functions and for the type checker only."""
    names = {".".join(path.relative_to(root).with_suffix("").parts): path for path in paths}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        found = {one if one in names else one.rpartition(".")[0] for one in imports(path)}
        graph[name] = (found & names.keys()) - {name}
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one circle of imports, if any."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle(modules(ROOT, [path for path in sources() if path != FACE])) == []


def test_contract_and_flusher_import_without_torch_and_mpi(tmp_path: Path) -> None:
    env = environment_without(tmp_path, ("torch", "mpi4py"))
    result = python(IMPORT_ALL, "holdfast", "flusher", "operator_side", env=env)
    assert result.returncode == 0, result.stderr
    assert python("import holdfast.command.cli, flusher.service", env=env).returncode == 0


def test_the_stager_imports_without_torch(tmp_path: Path) -> None:
    result = python("import stager, stager.command", env=environment_without(tmp_path, ("torch",)))
    assert result.returncode == 0, result.stderr


def test_the_command_line_lists_every_role_without_torch_and_mpi(tmp_path: Path) -> None:
    env = environment_without(tmp_path, ("torch", "mpi4py"))
    result = python("import holdfast.command.cli; holdfast.command.cli.main(['--help'])", env=env)
    assert result.returncode == 0, result.stderr
    for command in ("ls", "inspect", "verify", "pull", "stager", "flusher"):
        assert f"\n  {command} " in result.stdout


def test_naming_the_package_starts_neither_torch_nor_mpi() -> None:
    result = python(
        "import sys, holdfast.command.cli, stager, flusher; print(sorted({'torch', 'mpi4py.MPI'} & set(sys.modules)))"
    )
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_a_stager_and_a_flusher_load_nothing_that_only_other_stores_metrics_or_failures_need() -> None:
    unused = {"boto3", "fsspec", "http.server", "opentelemetry", "prometheus_client", "tenacity"}
    result = python(
        f"import sys, stager.command, stager.service, flusher.command; print(sorted({unused} & set(sys.modules)))"
    )
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_mpi_is_started_in_one_thin_file_per_package_at_most(package: str) -> None:
    # `holdfast doctor` starts doctor_job.py as a separate job; no module imports it.
    users = {path.name for path in (ROOT / package).rglob("*.py") if "mpi4py.MPI" in set(imports(path))}
    assert users - {"doctor_job.py"} <= ({"mpi.py"} if package in ("trainer_side", "stager") else set()), (
        users
    )


def test_no_source_file_prints() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert found == []


def test_every_source_file_says_what_it_owns() -> None:
    silent = [path.name for path in sources() if not ast.get_docstring(parsed(path))]
    assert silent == []


def test_a_file_that_the_docstring_of_a_package_names_is_there() -> None:
    """A name with folders starts at the root, a name without is any file of the product."""
    names = {path.name for path in sources()}
    gone = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources()
        if path.name == "__init__.py"
        for name in re.findall(r"[\w/*]+\.py\b", ast.get_docstring(parsed(path)) or "")
        if not (list(ROOT.glob(name)) if "/" in name else fnmatch.filter(names, name))
    ]
    assert gone == []


# -- the size of hands -------------------------------------------------------------------------------------------

COLLABORATORS_MAX = 7


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Number of parameters that a caller may give: all but `self`, including those with a default."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len(named) - (bool(named) and named[0].arg in ("self", "cls"))


def hands(path: Path) -> Iterator[tuple[str, int]]:
    """Every constructor and every public function of a file, with its number of parameters.

    Dataclasses and named tuples are exempt, because their constructors are generated: such a value groups parameters
    under a name, so that functions take fewer. Commands are exempt too: their parameters are their options.
    """
    module = parsed(path)
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    yield node.name, parameters(method)
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            is_command = any("click.command" in ast.unparse(one) for one in node.decorator_list)
            if not is_command:
                yield node.name, parameters(node)


def test_classes_take_at_most_seven_collaborators() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{name}": count
        for path in sources()
        for name, count in hands(path)
        if count > COLLABORATORS_MAX
    }
    assert found == {}, "give what belongs together a name, as save/rank_context.py does"


# -- names -------------------------------------------------------------------------------------------------------

# File names that several packages have, and why.
SHARED_FILES = {
    "__init__.py": "Python's",
    "__main__.py": "Python's: what `python -m` runs",
    "checks.py": "each side's part of `holdfast doctor`, under one entry-point group",
    "command.py": "each role's command, under one entry-point group",
    "mpi.py": "the one file of a package that starts MPI; see above",
    "service.py": "the loop of each role that is a process of its own",
}
# Class names that several files have, and why.
SHARED_CLASSES = {
    "HoldfastCallback": "public: each framework's callback has the name that its users look for",
}


def shared(names: Iterator[tuple[str, Path]]) -> dict[str, list[str]]:
    """Names that occur in more than one file, with the files."""
    found: dict[str, list[str]] = {}
    for name, path in names:
        found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def test_a_file_name_stands_for_one_thing() -> None:
    found = shared((path.name, path) for path in sources() if path.parent != INTEGRATIONS)
    assert sorted(found) == sorted(SHARED_FILES), found


def test_a_class_name_stands_for_one_thing() -> None:
    found = shared(
        (node.name, path)
        for path in sources()
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef)
    )
    assert sorted(found) == sorted(SHARED_CLASSES), found


PUBLIC = (
    *("holdfast/__init__.py", "holdfast/integrations/", "holdfast/errors.py", "holdfast/config.py"),
    *("trainer_side/__init__.py", "trainer_side/frameworks/"),
)


def test_only_public_modules_list_what_they_offer() -> None:
    found = [
        str(path.relative_to(ROOT))
        for path in sources()
        if any(
            isinstance(target, ast.Name) and target.id == "__all__"
            for node in parsed(path).body
            for target in getattr(node, "targets", [])
        )
    ]
    assert [name for name in found if not name.startswith(PUBLIC)] == []
