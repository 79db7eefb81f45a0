"""infra/skypilot as SkyPilot itself parses it, offline."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from yamllint import linter  # type: ignore[import-untyped]
from yamllint.config import YamlLintConfig  # type: ignore[import-untyped]

from operator_side.supervise.exit_codes import RETRY_EXIT_CODE
from tests.infra.toolbox import INFRA, Unavailable, sky_python
from tests.support.doc_commands import shown

FOLDER = INFRA / "skypilot"
FILES = sorted(FOLDER.glob("*.yaml"))
PAGE = INFRA.parent / "docs" / "exit-codes.md"
SECRETS = ("HOLDFAST_KEY", "STAGER_CERT", "STAGER_KEY", "STAGER_CA")
Parsed = list[dict[str, Any]]


@pytest.fixture(scope="session")
def sky(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str], list[str]], dict[str, list[Any]]]:
    """Parse the texts of files, and commands, by SkyPilot."""
    try:
        python = sky_python()
    except Unavailable as reason:
        pytest.skip(str(reason))
    home = tmp_path_factory.mktemp("sky")

    def parsed(files: list[str], lines: list[str]) -> dict[str, list[Any]]:
        done = subprocess.run(
            [python, Path(__file__).with_name("check_skypilot.py")],
            input=json.dumps({"files": files, "lines": lines}),
            env={**os.environ, "HOME": str(home), **dict.fromkeys(SECRETS, "secret")},
            cwd=INFRA.parent,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert isinstance(found, dict)
        return found

    return parsed


@pytest.fixture(scope="session")
def parse(sky: Callable[[list[str], list[str]], dict[str, list[Any]]]) -> Callable[[list[str]], Parsed]:
    return lambda files: sky(files, [])["files"]


@pytest.fixture(scope="session")
def as_parsed(parse: Callable[[list[str]], Parsed]) -> dict[str, dict[str, Any]]:
    """SkyPilot's result by the name of the file."""
    found = parse([path.read_text() for path in FILES])
    return {path.stem: one for path, one in zip(FILES, found, strict=True)}


def test_skypilot_takes_the_lines_of_the_page(
    sky: Callable[[list[str], list[str]], dict[str, list[Any]]],
) -> None:
    lines = [one.text for one in shown("infra/skypilot/README.md") if one.text.startswith("sky ")]
    wrong = [line.replace(" --", " --x") for line in lines if " --" in line]
    found = sky([], [*lines, *wrong])["lines"]
    assert found[: len(lines)] == [""] * 6
    assert all("No such option" in fault for fault in found[len(lines) :])


def test_the_pages_tls_additions_fit_the_job_group(parse: Callable[[list[str]], Parsed]) -> None:
    section = (FOLDER / "README.md").read_text().partition("## With TLS")[2].partition("\n## ")[0]
    blocks = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    of_stager, of_ranks = (yaml.safe_load(block) for block in blocks)
    given = documents(FOLDER / "job-group.yaml")
    (stager,) = (one for one in given if one["name"] == "stager")
    (ranks,) = (one for one in given if one["name"] == "ranks")
    for task, part in ((stager, of_stager), (ranks, of_ranks)):
        task["secrets"] |= part["secrets"]
    *before, last = stager["run"].splitlines()
    assert of_stager["run"].splitlines()[-1].startswith(last)
    stager["run"] = "\n".join([*before, of_stager["run"]])
    ranks["run"] = of_ranks["run"] + ranks["run"]
    (found,) = parse([yaml.safe_dump_all(given)])
    assert found["faults"] == []
    assert f"`{found['hosts']['stager']}`" in section
    for task in (stager, ranks):
        subprocess.run(["bash", "-n", "-c", task["run"]], check=True, timeout=30)


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def tasks(path: Path) -> dict[str, dict[str, Any]]:
    return {document["name"]: document for document in documents(path) if "run" in document}


def test_skypilot_takes_them_as_they_are(as_parsed: dict[str, dict[str, Any]]) -> None:
    assert {name: found["faults"] for name, found in as_parsed.items()} == {path.stem: [] for path in FILES}


def test_the_ranks_call_the_stager_by_the_name_that_skypilot_gives_it(
    as_parsed: dict[str, dict[str, Any]],
) -> None:
    (called,) = re.findall(r'HOLDFAST_STAGER="(.+):\d+"', tasks(FOLDER / "job-group.yaml")["ranks"]["run"])
    assert called.replace("$SKYPILOT_JOBGROUP_NAME", "holdfast") == as_parsed["job-group"]["hosts"]["stager"]


def test_a_job_group_on_machines_of_a_cloud_is_refused_because_it_has_no_names_there(
    parse: Callable[[list[str]], Parsed],
) -> None:
    text = (FOLDER / "job-group.yaml").read_text().replace("infra: kubernetes", "infra: aws/us-east-1")
    (found,) = parse([text])
    assert "in-group networking, only supported on Kubernetes" in found["faults"][0]


def test_75_starts_the_ranks_again_as_often_as_it_takes_and_a_bug_three_times(
    as_parsed: dict[str, dict[str, Any]],
) -> None:
    """By SkyPilot's own count; with two machines the first to end makes SkyPilot kill the other one: 137."""
    for file, task in (("job-group", "ranks"), ("ranks", "holdfast-ranks")):
        assert as_parsed[file]["restarts"][task] == [True] * 9 + [True] * 3 + [False] + [True]


def test_each_task_restarts_on_the_machines_that_it_has(as_parsed: dict[str, dict[str, Any]]) -> None:
    """SkyPilot's default strategy terminates the machines first, and the stager's ring with them."""
    for name, found in as_parsed.items():
        assert set(found["strategies"].values()) == {"FailoverStrategyExecutor"}, name


def test_the_page_of_exit_codes_says_what_the_files_say() -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text().partition("## SkyPilot")[2], re.DOTALL)
    wanted = yaml.safe_load(shown)["resources"]["job_recovery"]
    assert wanted["recover_on_exit_codes"] == [RETRY_EXIT_CODE]
    for path in FILES:
        for name, task in tasks(path).items():
            if "ranks" in name:
                assert task["resources"]["job_recovery"] == wanted


def test_a_task_runs_the_same_line_in_a_group_and_by_itself() -> None:
    group = tasks(FOLDER / "job-group.yaml")
    (alone,) = tasks(FOLDER / "ranks.yaml").values()
    without = [line for line in group["ranks"]["run"].splitlines() if "export HOLDFAST_STAGER" not in line]
    assert without == alone["run"].splitlines()
    (alone,) = tasks(FOLDER / "stager.yaml").values()
    listens = group["stager"]["run"].replace("0.0.0.0:29411", '"$SKYPILOT_NODE_IPS:29411"')
    assert listens == alone["run"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_skypilot_files_pass_yamllint(path: Path) -> None:
    config = YamlLintConfig("{extends: default, rules: {line-length: {max: 140}, document-start: disable}}")
    assert [str(problem) for problem in linter.run(path.read_text(), config)] == []
