"""The extra [s3fs] brings a current s3fs: without a floor, resolvers walk back to releases of 2020."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import s3fs

_FLOOR = (2025, 3)
_PROJECT = Path(__file__).resolve().parents[4] / "pyproject.toml"


def _release(version: str) -> tuple[int, int]:
    year, month = re.findall(r"\d+", version)[:2]
    return int(year), int(month)


def test_the_installed_s3fs_is_current() -> None:
    assert _release(s3fs.__version__) >= _FLOOR


@pytest.mark.skipif(
    "HOLDFAST_TEST_RESOLVE" not in os.environ, reason="asks the package index: HOLDFAST_TEST_RESOLVE=1"
)
@pytest.mark.timeout(600)  # pip may walk back through many releases
def test_the_dependencies_and_the_extra_resolve_to_a_current_s3fs(tmp_path: Path) -> None:
    project = tomllib.loads(_PROJECT.read_text())["project"]
    dependencies = [*project["dependencies"], *project["optional-dependencies"]["s3fs"]]
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--quiet",
        "--report",
        str(report),
    ]
    done = subprocess.run([*command, *dependencies], capture_output=True, text=True, check=False)
    if done.returncode != 0 and re.search(
        "Connection|resolve host|No matching distribution|timed out", done.stderr
    ):
        pytest.skip(f"no package index here: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    resolved = {
        item["metadata"]["name"].lower(): item["metadata"]["version"]
        for item in json.loads(report.read_text())["install"]
    }
    assert _release(resolved["s3fs"]) >= _FLOOR
    assert _release(resolved["fsspec"]) >= _FLOOR
    assert tuple(map(int, resolved["boto3"].split(".")[:2])) >= (1, 36)
