"""Terraform itself on every module and example: formatted, initialised, valid, and its own tests pass.

The provider has the schema of hashicorp/aws 6.25.0, and no code behind it: wrong arguments, types and references are
found, wrong enumerations and AWS's own rules are not. infra/README.md explains how to use the real provider.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.infra.conftest import terraform_on
from tests.infra.toolbox import INFRA, PROVIDER_VERSION, Terraform

MODULES = sorted(str(path.parent.relative_to(INFRA)) for path in INFRA.glob("*/*/main.tf"))


def test_modules_and_examples_are_those_of_the_readme() -> None:
    assert [
        "examples/cluster",
        *(
            "modules/network",
            "modules/node",
            "modules/operator",
            "modules/stager",
            "modules/storage",
            "modules/trainers",
        ),
    ] == MODULES


def test_terraform_files_are_formatted(shared_terraform: Terraform) -> None:
    done = shared_terraform("fmt", "-check", "-recursive", "-diff")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("module", MODULES)
def test_terraform_modules_are_valid(shared_terraform: Terraform, module: str) -> None:
    shared_terraform.init(module)
    done = shared_terraform("validate", "-json", within=module)
    verdict = json.loads(done.stdout)
    assert (verdict["valid"], verdict["diagnostics"]) == (True, [])


@pytest.mark.parametrize("module", MODULES)
def test_a_modules_own_tests_pass(shared_terraform: Terraform, module: str) -> None:
    messages = shared_terraform.test(module)
    problems = [item["diagnostic"] for item in messages if item["type"] == "diagnostic"]
    (summary,) = [item["test_summary"] for item in messages if item["type"] == "test_summary"]
    written = sum(len(_runs(path)) for path in (INFRA / module / "tests").glob("*.tftest.hcl"))
    assert (summary["status"], problems) == ("pass", [])
    assert summary["passed"] == written > 0


def test_the_provider_is_found_and_started_as_terraform_does_it(tools: Path, tmp_path: Path) -> None:
    terraform = terraform_on(tmp_path / "infra", None)
    terraform.init("modules/storage")
    lock = (terraform.infra / "modules/storage/.terraform.lock.hcl").read_text(encoding="utf-8")
    assert f'version     = "{PROVIDER_VERSION}"' in lock
    assert json.loads(terraform("validate", "-json", within="modules/storage").stdout)["valid"]
    schema = json.loads(terraform("providers", "schema", "-json", within="modules/storage").stdout)
    (aws,) = schema["provider_schemas"].values()
    assert "aws_launch_template" in aws["resource_schemas"]


@pytest.mark.parametrize(
    "path", sorted(INFRA.glob("*/*/*.tf")), ids=lambda path: str(path.relative_to(INFRA))
)
def test_every_variable_and_output_says_what_it_is(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    for kind, needed in {"variable": ("description", "type"), "output": ("description", "value")}.items():
        for name, body in re.findall(rf'^{kind} "(\w+)" \{{\n(.*?)^\}}', source, re.MULTILINE | re.DOTALL):
            for argument in needed:
                assert re.search(rf"^  {argument} +=", body, re.MULTILINE), f"{kind} {name} has no {argument}"


@pytest.mark.parametrize("path", sorted(INFRA.glob("*/*/variables.tf")), ids=lambda path: path.parent.name)
def test_every_refusal_says_what_was_expected(path: Path) -> None:
    for message in re.findall(r'^ +error_message = "(.*)"$', path.read_text(encoding="utf-8"), re.MULTILINE):
        assert re.match(
            r"\w+: (expected .+|store and cluster_url come from the run's tags; leave them out\.)$", message
        )


def _runs(path: Path) -> list[str]:
    return re.findall(r'^run "(\w+)" \{', path.read_text(encoding="utf-8"), re.MULTILINE)
