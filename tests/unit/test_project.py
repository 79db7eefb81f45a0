"""The project's frame: Makefile, pages, compose file, licence and CI agree with each other and with the tree."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.pages.test_documents import text
from tests.support.plain_words import RECORDED

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "docker-compose.yml"
NFS = ROOT / "infra/docker/nfs.yml"
TARGETS = {
    "setup",
    "demo",
    "test",
    "check",
    "late",
    "trackers",
    "rest",
    "more",
    "remaining",
    "services",
    "chaos",
    "lint",
    "types",
    "bench",
    "docs",
    "figures",
    "soak",
    "floor",
    "gpu",
    "nfs",
    "infra",
    "pm",
    "hosts",
    "slurm",
    "compose",
    "ci",
    "clean",
}
ONE_SHOT = {"bucket", "keys"}  # they end by themselves, so nothing is there to be healthy

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """The services of docker-compose.yml, and the one that infra/docker/nfs.yml adds."""
    document, nfs = (yaml.safe_load(path.read_text())["services"] for path in (COMPOSE, NFS))
    assert nfs.keys() - document.keys() == {"nfs"}
    return {**document, "nfs": nfs["nfs"]}


# -- Makefile and CI -------------------------------------------------------------------------------------------


@needs_make
def test_make_alone_lists_every_target() -> None:
    done = make()
    assert done.returncode == 0, done.stderr
    listed = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")}
    assert listed == TARGETS | {"help"}


@needs_make
def test_an_old_python_is_refused_by_name_before_anything_is_made(tmp_path: Path) -> None:
    old = tmp_path / "python3.8"
    old.write_text('#!/bin/sh\ntest "$1" = --version && { echo "Python 3.8.10"; exit 0; }\nexit 1\n')
    old.chmod(0o755)
    done = make("setup", f"VENV={tmp_path / 'venv'}", f"PYTHON={old}")
    assert done.returncode != 0
    assert "3.11 or newer" in done.stderr
    assert "Python 3.8.10" in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("fails", "code", "last"),
    [
        ("", 0, "35 passed, 0 failed, 5 skipped"),
        ("remaining", 2, "34 passed, 1 failed, 5 skipped"),
        ("types", 2, "35 passed, 0 failed, 5 skipped"),
        ("services", 2, "35 passed, 0 failed, 5 skipped"),
    ],
)
def test_ci_runs_the_same_targets_as_people_and_sums_up(
    tmp_path: Path, fails: str, code: int, last: str
) -> None:
    done = _ci(tmp_path, ROOT / ".ci/run", fails)
    ran = (tmp_path / "ran").read_text().split()
    assert ran[0] == "setup"
    assert sorted(ran) == ["lint", "remaining", "services", "setup", "test", "types"]
    assert done.stdout.splitlines()[-1] == last
    assert done.returncode == code
    assert ("not passed" in done.stdout) == bool(fails)


def test_ci_says_how_many_tests_a_slow_machine_leaves_out(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    script = (ROOT / ".ci/run").read_text().replace("begin_seconds_max=3600", "begin_seconds_max=-1")
    (tmp_path / ".ci/run").write_text(script)
    (tmp_path / ".ci/run").chmod(0o755)
    done = _ci(tmp_path, tmp_path / ".ci/run", "")
    assert "7 tests are left out on a machine as slow as this one" in done.stdout
    assert done.stdout.splitlines()[-1] == "35 passed, 0 failed, 5 skipped"
    assert done.returncode == 0


def _ci(tmp_path: Path, script: Path, fails: str) -> subprocess.CompletedProcess[str]:
    """Run it with a `make` that only says what a target would."""
    make = tmp_path / "make"
    make.write_text(f"""#!/bin/sh
echo $1 >>{tmp_path}/ran
case $1-{fails} in
test-*) echo "============ 10 passed, 3 skipped in 284.20s (0:04:44) ============" ;;
remaining-remaining) echo "===== 1 failed, 24 passed, 2 skipped, 1 warning in 9.1s =====" ;;
remaining-*) echo "25 passed, 2 skipped, 2 deselected in 9.1s" ;;
esac
case "$*" in
remaining*BEGIN_SECONDS_MAX=1) echo "7 tests are left out: none begins after 1 seconds" ;;
esac
test $1 != "{fails}" || exit 2
""")
    make.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    return subprocess.run([script], env=environment, capture_output=True, text=True, check=False)


def test_no_odd_sentence_is_allowed_where_users_read() -> None:
    assert RECORDED["messages"] == RECORDED["README.md"] == RECORDED["docs/tutorial.md"] == 0


# -- the licence -----------------------------------------------------------------------------------------------


def test_the_licence_is_whole_and_the_one_that_is_named() -> None:
    licence = text("LICENSE")
    assert licence.split()[:4] == ["Apache", "License", "Version", "2.0,"]
    assert all(re.search(rf"^ +{number}\. [A-Z]", licence, re.MULTILINE) for number in range(1, 10))
    assert "END OF TERMS AND CONDITIONS" in licence
    assert tomllib.loads(text("pyproject.toml"))["project"]["license"] == "Apache-2.0"


# -- docker-compose.yml ----------------------------------------------------------------------------------------


def test_compose_has_both_stores_a_stager_and_two_ranks(services: dict[str, Any]) -> None:
    assert {"s3", "nfs", "stager", "rank0", "rank1"} <= services.keys()


def test_services_are_pinned_healthy_and_closed_to_the_outside(services: dict[str, Any]) -> None:
    for name, service in services.items():
        image = service["image"].removesuffix("}")
        built = re.fullmatch(r"[\w-]+:local", image) is not None
        assert built == ("build" in service), name
        assert built or re.search(r"[\w/]+:v?\d+\.\d+\.\d+@sha256:[0-9a-f]{64}$", image), name
        assert ("healthcheck" in service) != (name in ONE_SHOT), name
        assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", [])), name
        assert set(service.get("depends_on", {})) <= services.keys(), name


DOCKERFILES = sorted(
    path
    for pattern in ("Dockerfile", "Containerfile")
    for folder in ("infra", "tests")
    for path in (ROOT / folder).rglob(pattern)
)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_image_runs_as_root_or_is_built_from_what_may_change(path: Path) -> None:
    lines = path.read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users, "it runs as root"
    assert users[-1] in {"873", "s3", "nobody"}
    (base,) = (line.split()[1] for line in lines if line.startswith("FROM "))
    found = re.fullmatch(r"\$\{(\w+)\}", base)
    assert found, "the base can be given"
    (default,) = (line for line in lines if re.match(rf"ARG {found[1]}\b", line))
    _, given, image = default.partition("=")
    assert not given or re.fullmatch(r"[\w/]+:\d+\.\d+\.\d+[\w.-]*@sha256:[0-9a-f]{64}", image), default


def test_five_images_have_dockerfiles() -> None:
    assert len(DOCKERFILES) == 5


def test_no_service_is_told_to_be_root(services: dict[str, Any]) -> None:
    assert [name for name, service in services.items() if "user" in service] == []
    assert "allow-run-as-root" not in text("infra/docker/launch")


def test_actions_of_ci_are_pinned_to_commits() -> None:
    workflows = sorted((ROOT / ".github").rglob("*.y*ml"))
    assert workflows
    for path in workflows:
        for line in path.read_text().splitlines():
            if "uses:" in line:
                assert re.search(r"uses: [\w-]+/[\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+$", line), line


def test_no_user_of_this_machine_is_root_on_the_nfs_export(services: dict[str, Any]) -> None:
    assert "ports" not in services["nfs"]
    client = re.search(r"CLIENT \{(.*?)\}", text("infra/docker/nfs/ganesha.conf"), re.DOTALL)
    assert client is not None
    settings = dict(re.findall(r"(\w+) = (\S+);", client[1]))
    assert (settings["Squash"], settings["Anonymous_Uid"], settings["PrivilegedPort"]) == (
        "All_Squash",
        "873",
        "true",
    )
    (network,) = yaml.safe_load(NFS.read_text())["networks"]["cluster"]["ipam"]["config"]
    assert settings["Clients"] == network["subnet"]


def test_no_service_has_more_rights_than_it_needs(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert not {"privileged", "security_opt", "devices", "pid", "network_mode"} & service.keys(), name
        added = {"DAC_READ_SEARCH"} if name == "nfs" else set()
        assert set(service.get("cap_add", [])) == added, name
    assert services["nfs"]["cap_drop"] == ["ALL"]


def test_build_arguments_of_images_can_be_given(services: dict[str, Any]) -> None:
    built = [service["build"] for service in services.values() if "build" in service]
    assert built
    for build in built:
        file = Path(build["context"]) / build.get("dockerfile", "Dockerfile")
        arguments = dict(re.findall(r"^ARG (\w+)=?(.*)", text(str(file)), re.MULTILINE))
        assert build["args"] == {name: f"${{{name}:-{default}}}" for name, default in arguments.items()}, file


def test_secrets_come_from_the_environment(services: dict[str, Any]) -> None:
    secrets = [
        value
        for service in services.values()
        for name, value in service.get("environment", {}).items()
        if re.search("SECRET|PASSWORD|KEY", name)
    ]
    assert secrets
    assert all(re.fullmatch(r"\$\{HOLDFAST_S3_(KEY|SECRET):-[\w:-]+\}", value) for value in secrets)


def test_compose_scripts_are_there_and_can_run(services: dict[str, Any]) -> None:
    places = {"/opt/holdfast/infra/docker/": "", "/opt/s3/": "s3/", "/opt/nfs/": "nfs/"}
    words = [
        word
        for service in services.values()
        for word in [*service.get("command", []), *service.get("healthcheck", {}).get("test", [])]
    ] + re.findall(r'"(/opt/[^"]+)"', text("infra/docker/s3/Dockerfile"))
    named = {
        folder + word.removeprefix(place)
        for word in words
        for place, folder in places.items()
        if word.startswith(place)
    }
    folder = ROOT / "infra/docker"
    programs = {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and not path.suffix
    }
    assert named == {name for name in programs if Path(name).name != "Dockerfile"}
    for name in named:
        script = folder / name
        assert os.access(script, os.X_OK), name
        if script.read_text().startswith("#!/bin/sh"):
            assert subprocess.run(["sh", "-n", script], check=False).returncode == 0, name
        else:
            ast.parse(script.read_text())


@pytest.mark.parametrize(
    "ignored", ["infra/docker/Dockerfile.dockerignore", "infra/kubernetes/Containerfile.dockerignore"]
)
def test_an_image_has_every_package(ignored: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    let_through = (ROOT / ignored).read_text().splitlines()
    assert {f"!{package.rstrip('*')}" for package in packages} <= set(let_through)
