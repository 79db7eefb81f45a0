"""The arrows of the design: who may import whom, and what must work where something is not installed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.blocked import environment_without

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("holdfast", "trainer_side", "stager", "flusher", "operator_side")

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
    """Full names of all that a file imports, anywhere in it; `from a import b` gives `a.b`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_import_contracts_of_pyproject_are_kept() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


@pytest.mark.parametrize("blocked", [("torch",), ("mpi4py",)])
def test_the_blocker_blocks(blocked: tuple[str, ...], tmp_path: Path) -> None:
    result = python(f"import {blocked[0]}", env=environment_without(tmp_path, blocked))
    assert result.returncode == 1
    assert f"No module named '{blocked[0]}'" in result.stderr


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


@pytest.mark.parametrize("package", PACKAGES)
def test_mpi_is_started_in_one_thin_file_per_package_at_most(package: str) -> None:
    # `holdfast doctor` starts doctor_job.py as a job of its own, and nothing imports it.
    users = {path.name for path in (ROOT / package).rglob("*.py") if "mpi4py.MPI" in set(imports(path))}
    assert users - {"doctor_job.py"} <= ({"mpi.py"} if package in ("trainer_side", "stager") else set()), (
        users
    )


def test_no_source_file_prints() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert found == []


def test_every_source_file_says_what_it_owns() -> None:
    silent = [
        path.name for path in sources() if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert silent == []
