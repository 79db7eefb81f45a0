"""Fixtures of the tests of infra/: tools, provider, rendered examples. Skipped where the tools cannot be installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.infra.rendered import Rendered, render
from tests.infra.toolbox import INFRA, Terraform, Unavailable, install, running_provider


@pytest.fixture(scope="session")
def tools() -> Path:
    """The folder with the tools."""
    try:
        return install()
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def provider(tools: Path) -> Iterator[Path]:
    """Socket of a running provider."""
    with running_provider() as socket:
        yield socket


@pytest.fixture
def terraform(provider: Path, tmp_path: Path) -> Terraform:
    """Terraform on this test's own copy of infra/."""
    return terraform_on(tmp_path / "infra", provider)


@pytest.fixture(scope="session")
def shared_terraform(provider: Path, tmp_path_factory: pytest.TempPathFactory) -> Terraform:
    """Terraform on a copy of infra/ that tests share and do not change."""
    return terraform_on(tmp_path_factory.mktemp("shared") / "infra", provider)


@pytest.fixture(scope="session")
def minimal(shared_terraform: Terraform) -> dict[str, Rendered]:
    """The example as rendered, by the name of the test run."""
    return render(shared_terraform, "examples/cluster")


@pytest.fixture(scope="session")
def efs(minimal: dict[str, Rendered]) -> Rendered:
    """The example as rendered with a file system as the store."""
    return minimal["with_efs"]


def terraform_on(copy: Path, provider: Path | None) -> Terraform:
    shutil.copytree(INFRA, copy, ignore=shutil.ignore_patterns(".terraform*", "*.tfstate*"))
    try:
        return Terraform(copy, provider)
    except Unavailable as reason:
        pytest.skip(str(reason))
