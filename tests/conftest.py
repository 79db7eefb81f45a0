"""Fixtures of the whole suite: the S3 servers, started once, with a fresh bucket for each test."""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.support.costs import Costs
from tests.support.hangs import Hangs
from tests.support.left_out import LeftOut
from tests.support.moto_s3 import running_moto
from tests.support.once import made_once
from tests.support.quick_site import sitecustomize  # noqa: F401 - what it says of a job is so here, too
from tests.support.s3_place import S3Place, fresh_bucket, s3_environment
from tests.support.swift import SwiftServer, install, running_swift

if TYPE_CHECKING:
    from tests.support.main_job import Finished

# An example may take as long as a busy machine makes it take.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Limits that .ci/run sets."""
    parser.addoption("--unit-cpu-seconds-max", type=float, help="more CPU seconds fail a test of tests/unit")
    parser.addoption(
        "--begin-seconds-max", type=float, default=0, help="later no test begins, and those left are skipped"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Measure the cost of each test, end the processes of a hung one, and skip tests when time is up."""
    config.pluginmanager.register(Costs(config))
    config.pluginmanager.register(LeftOut(config))
    config.pluginmanager.register(Hangs())


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection: they live until the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_checkpointer_of_another_test() -> Iterator[None]:
    """Let a test open a Checkpointer although a failed test before it left one open."""
    yield
    if (seat := sys.modules.get("trainer_side.seat")) is not None:
        seat._seats.clear()


@pytest.fixture(scope="session")
def swift_server() -> Iterator[SwiftServer]:
    """A running OpenStack Swift; its tests are skipped where it cannot be installed."""
    try:
        install()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"Swift cannot be installed here: {str(error.stderr)[-300:]}")
    with running_swift() as server:
        yield server


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The main job, never interrupted: one run for all workers."""
    from tests.support.main_job import Finished, finish  # torch comes with it, which most runs do without

    return Finished.of(made_once(tmp_path_factory, "main-job", finish))


@pytest.fixture
def reference(finished: Finished) -> Path:
    """The files that the ranks of the main job wrote."""
    return finished.out


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    """URL of a running moto server."""
    with running_moto() as endpoint:
        yield endpoint


@pytest.fixture
def swift_s3(swift_server: SwiftServer, monkeypatch: pytest.MonkeyPatch) -> S3Place:
    """A fresh bucket on Swift; endpoint and credentials are in the environment."""
    environment = s3_environment(swift_server.endpoint, swift_server.access_key, swift_server.secret_key)
    return _place("swift", environment, monkeypatch)


@pytest.fixture
def moto_s3(moto_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> S3Place:
    """A fresh bucket on moto; endpoint and credentials are in the environment."""
    return _place("moto", s3_environment(moto_endpoint, "testing", "testing"), monkeypatch)


def _place(server: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> S3Place:
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return S3Place(server, environment["AWS_ENDPOINT_URL"], fresh_bucket(), environment)


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    """A directory in memory, as a tier in memory and CUDA want it: `tmp_path` may lie on a disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="holdfast-test-") as directory:
        yield Path(directory)
