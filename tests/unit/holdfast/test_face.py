"""`import holdfast` offers the whole public interface, and imports a name at its first use."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner

import holdfast
import holdfast.integrations
import trainer_side
from holdfast import errors
from holdfast.command.cli import cli
from tests.support.blocked import environment_without

ROOT = Path(__file__).resolve().parents[3]
HEAVY = ("numpy", "torch", "mpi4py", "pydantic", "boto3", "fsspec", "click", "rich")
LAZY_PACKAGES = ("holdfast", "trainer_side", "holdfast.integrations")
LAZY_FILES = [
    *(ROOT / "holdfast/__init__.py", ROOT / "trainer_side/__init__.py"),
    *sorted((ROOT / "holdfast/integrations").glob("*.py")),
]


def fresh(code: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


def loaded_by(code: str, names: tuple[str, ...]) -> list[str]:
    """Return the modules, of these, that a fresh process has imported after `code`."""
    done = fresh(f"import sys\n{code}\nprint(*[name for name in {names} if name in sys.modules])")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("package", LAZY_PACKAGES)
def test_importing_a_lazy_package_loads_nothing_heavy(package: str) -> None:
    assert loaded_by(f"import {package}", (*HEAVY, "lightning", "transformers", "accelerate")) == []


@pytest.mark.parametrize(
    ("name", "needs"),
    [("StateError", ["holdfast.errors"]), ("Split", ["torch", "trainer_side.state.split_tensor"])],
)
def test_a_name_loads_only_the_module_that_defines_it(name: str, needs: list[str]) -> None:
    others = ("trainer_side.checkpointer", "holdfast.config", "mpi4py")
    assert loaded_by(f"import holdfast; holdfast.{name}", (*needs, *others)) == needs


def test_the_face_has_every_public_name() -> None:
    assert {*errors.__all__, *trainer_side.__all__} <= set(holdfast.__all__)
    for name in trainer_side.__all__:
        assert getattr(holdfast, name) is getattr(trainer_side, name)
    for name in errors.__all__:
        assert getattr(holdfast, name) is getattr(errors, name)


@pytest.mark.parametrize("path", LAZY_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_type_checker_sees_the_names_of_the_run_time(path: Path) -> None:
    module = import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    (typed,) = (node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in typed.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    modules: dict[str, tuple[str, ...]] = vars(module).get("_MODULES", {})
    homes = {name: home for home, names in modules.items() for name in names}
    submodules = {name for name, home in seen.items() if home == module.__name__}
    assert seen == homes | dict.fromkeys(submodules, module.__name__)
    assert seen.keys() == set(module.__all__) - {"__version__"}
    assert seen.keys() <= set(dir(module))


def test_each_framework_has_its_integration() -> None:
    for name in holdfast.integrations.__all__:
        home = ast.parse((ROOT / f"trainer_side/frameworks/{name}.py").read_text(encoding="utf-8"))
        (offered,) = (
            ast.literal_eval(node.value)
            for node in home.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        )
        assert offered == import_module(f"holdfast.integrations.{name}").__all__


def test_a_misspelt_name_raises_attribute_error_with_a_suggestion() -> None:
    with pytest.raises(AttributeError, match="module 'holdfast' has no attribute 'Chekpointer'"):
        holdfast.Chekpointer  # type: ignore[attr-defined]  # noqa: B018
    done = fresh("import holdfast; holdfast.Chekpointer")
    assert done.stderr.splitlines()[-1].endswith("Did you mean: 'Checkpointer'?")


@pytest.mark.parametrize(
    "line", ["from holdfast import Checkpointer", "from holdfast.integrations.epochs import EpochLoader"]
)
def test_a_missing_torch_is_named_with_its_extra(line: str, tmp_path: Path) -> None:
    done = fresh(line, environment_without(tmp_path, ("torch",)))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "needs torch, which is not installed" in last
    assert "extra [torchrun] or [trainer]" in last
    assert "pip install 'torch>=" in last


def test_the_version_is_defined_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "holdfast.__version__"}
    assert version("holdfast") == holdfast.__version__
    assert CliRunner().invoke(cli, ["--version"]).output == f"holdfast {holdfast.__version__}\n"
