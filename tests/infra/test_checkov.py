"""checkov, a scanner for Terraform, over all of infra/: no finding, and a reason for each suppression."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.infra.toolbox import INFRA, tool

SKIP = re.compile(r"#checkov:skip=(CKV2?_AWS_\d+):(.+)")


def scan(folder: Path) -> dict[str, Any]:
    command: list[str | Path] = [
        tool("checkov"),
        "--directory",
        folder,
        "--framework",
        "terraform",
        "--skip-download",
        "--output",
        "json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.usefixtures("tools")
def test_checkov_finds_nothing_in_the_modules_as_the_examples_use_them(tmp_path: Path) -> None:
    copy = tmp_path / "infra"
    shutil.copytree(INFRA, copy, ignore=shutil.ignore_patterns(".terraform*", "*.tftest.hcl", "*.tfmock.hcl"))
    report = scan(copy)
    results = report["results"]
    assert results["parsing_errors"] == []
    assert [(check["check_id"], check["resource"]) for check in results["failed_checks"]] == []
    assert report["summary"]["passed"] > 100


@pytest.mark.usefixtures("tools")
def test_checkov_finds_a_group_that_is_open(tmp_path: Path) -> None:
    shutil.copytree(INFRA / "modules/network", tmp_path / "network", ignore=shutil.ignore_patterns("tests"))
    (tmp_path / "network/open.tf").write_text(
        'resource "aws_security_group" "open" {\n  description = "open"\n  vpc_id = aws_vpc.this.id\n'
        '  ingress {\n    description = "SSH"\n    from_port = 22\n    to_port = 22\n    protocol = "tcp"\n'
        '    cidr_blocks = ["0.0.0.0/0"]\n  }\n}\n'
    )
    failed = {check["check_id"] for check in scan(tmp_path)["results"]["failed_checks"]}
    assert "CKV_AWS_24" in failed


def test_every_check_set_aside_has_its_reason_in_place() -> None:
    skips = [
        (path, number, line)
        for path in sorted(INFRA.rglob("*.tf"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if "checkov:skip" in line
    ]
    assert skips
    for path, number, line in skips:
        match = SKIP.fullmatch(line.strip())
        where = f"{path}:{number}: {line.strip()}"
        assert match is not None, where
        assert len(match[2]) > 30 or match[2] == "as above", where
