"""A wheel of this source works in an environment with only the packages that its metadata requires."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import holdfast

ROOT = Path(__file__).resolve().parents[2]
_BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
_TRAINER = """
import torch
from holdfast import Checkpointer, TrainerConfig
config = TrainerConfig(store={store!r}, tiers=("memory",))
with Checkpointer({{"weight": torch.ones(4)}}, every=1, config=config) as checkpointer:
    print(checkpointer.restore(), type(checkpointer).__name__)
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "PYTHON"))}
    done = subprocess.run(
        command, cwd=cwd, env={**kept, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def needed(requirements: list[str], found: dict[str, Distribution] | None = None) -> dict[str, Distribution]:
    """The distributions that pip would install for these requirements, from those that are installed here."""
    found = {} if found is None else found
    for requirement in map(Requirement, requirements):
        extras = requirement.extras or {""}
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.name not in found:
            found[requirement.name] = one = distribution(requirement.name)
            assert requirement.specifier.contains(one.version, prereleases=True), requirement
            below = [Requirement(line) for line in one.requires or []]
            wanted = [
                line
                for line in below
                if not line.marker or any(line.marker.evaluate({"extra": extra}) for extra in extras)
            ]
            for line in wanted:
                line.marker = None
            needed([str(line) for line in wanted], found)
    return found


def link(one: Distribution, site: Path) -> None:
    """Put an installed distribution into another environment."""
    for name in {path.parts[0] for path in one.files or [] if path.parts[0] not in ("..", "__pycache__")}:
        source, target = Path(str(one.locate_file(name))), site / name
        if source.exists() and not target.exists():
            target.symlink_to(source)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the files that the image of infra/docker is built from."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for line in (ROOT / "infra/docker/Dockerfile.dockerignore").read_text().splitlines():
        source, target = ROOT / line[1:], tree / line[1:]
        if not line.startswith("!"):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    run(sys.executable, "-c", _BUILD, out, cwd=tree)
    (made,) = out.glob("*.whl")
    return made


def installed(wheel: Path, place: Path, *extras: str) -> Path:
    """The folder of programs of a new environment with the wheel, and what these extras ask for."""
    run(sys.executable, "-m", "venv", "--without-pip", place, cwd=place.parent)
    programs = place / "bin"
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "--disable-pip-version-check", "-q")
    run(*pip, "install", "--no-index", "--no-deps", "--no-compile", wheel, cwd=place.parent)
    (site,) = place.glob("lib/python*/site-packages")
    (info,) = site.glob("holdfast-*.dist-info")
    ours = [Requirement(line) for line in Distribution.at(info).requires or []]
    wanted = [
        line
        for line in ours
        if not line.marker or any(line.marker.evaluate({"extra": extra}) for extra in extras)
    ]
    for line in wanted:
        line.marker = None
    for one in needed([str(line) for line in wanted]).values():
        link(one, site)
    return programs


def test_the_base_install_has_the_command_and_names_the_extra_of_a_trainer(
    wheel: Path, tmp_path: Path
) -> None:
    programs = installed(wheel, tmp_path / "base")
    assert run(programs / "holdfast", "--version", cwd=tmp_path) == f"holdfast {holdfast.__version__}\n"
    assert "Usage: holdfast flusher" in run(programs / "holdfast", "flusher", "--help", cwd=tmp_path)
    touched = "try: holdfast.Checkpointer\nexcept ImportError as error: print(error)"
    code = f"import holdfast; print(holdfast.StateError.code)\n{touched}"
    said = run(programs / "python", "-c", code, cwd=tmp_path)
    assert said.startswith("state\nCheckpointer needs torch")


def test_a_trainer_of_torchrun_restores_without_mpi(wheel: Path, tmp_path: Path) -> None:
    programs = installed(wheel, tmp_path / "trainer", "torchrun")
    code = (
        _TRAINER.format(store=str(tmp_path / "run"))
        + "import importlib.util as u; print(u.find_spec('mpi4py'))"
    )
    said = run(programs / "python", "-c", code, cwd=tmp_path, RANK="0", WORLD_SIZE="1")
    assert said == "0 Checkpointer\nNone\n"


def test_a_stager_starts_without_torch(wheel: Path, tmp_path: Path) -> None:
    programs = installed(wheel, tmp_path / "stager", "stager")
    assert "Usage: holdfast stager" in run(programs / "holdfast", "stager", "--help", cwd=tmp_path)
    code = "import holdfast, mpi4py, stager.command, importlib.util as u; print(u.find_spec('torch'))"
    assert run(programs / "python", "-c", code, cwd=tmp_path) == "None\n"
