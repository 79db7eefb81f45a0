"""Fixtures for tests on several hosts: the network, a store on it, and an undisturbed run."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import job
from tests.hosts.cluster import EVERY, STEPS
from tests.hosts.network import Network, running_network, why_not
from tests.support.cluster import Cluster
from tests.support.s3_place import S3Place, fresh_bucket, s3_environment
from tests.support.swift import SwiftServer, install


@pytest.fixture(scope="session")
def network() -> Iterator[Network]:
    """A bridge; skips the tests where no host can be made."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with running_network() as made:
        yield made


@pytest.fixture(scope="session")
def store_server(network: Network) -> Iterator[SwiftServer]:
    """OpenStack Swift with an address on that bridge."""
    try:
        commands = install()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"Swift cannot be installed here: {str(error.stderr)[-300:]}")
    with tempfile.TemporaryDirectory(prefix="holdfast-swift-") as home:
        server = SwiftServer(Path(home), commands, address=network.here)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture
def place(store_server: SwiftServer, monkeypatch: pytest.MonkeyPatch) -> S3Place:
    """A fresh bucket, reached from here and from the hosts."""
    environment = s3_environment(store_server.endpoint, store_server.access_key, store_server.secret_key)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return S3Place("swift", environment["AWS_ENDPOINT_URL"], fresh_bucket(), environment)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training on three ranks, uninterrupted."""
    directory = tmp_path_factory.mktemp("reference")
    cluster = Cluster(directory, str(directory / "store"), {"TRAIN_WIDTH": job.WIDTH}, script=job.__file__)
    with cluster.start(3, str(STEPS), str(EVERY)) as made:
        made.succeed(150)
    return cluster.out(1) / "cluster-1"
