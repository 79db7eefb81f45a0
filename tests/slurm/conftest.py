"""The network of tests/hosts, for tests with a real Slurm on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.cluster import cluster_of
from tests.hosts.network import Network, running_network
from tests.slurm.slurm import running_slurm, why_not
from tests.slurm.story import Story


@pytest.fixture(scope="session")
def network() -> Iterator[Network]:
    """A bridge; skips the tests where there is no Slurm, or no host can be made."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with running_network() as made:
        yield made


@pytest.fixture
def story(tmp_path: Path, network: Network) -> Iterator[Story]:
    """A Slurm on three nodes of this network; see `Story`."""
    with (
        cluster_of(tmp_path, network, None, trainers=3) as cluster,
        running_slurm(cluster, ["t1", "t2", "t3"]) as slurm,
    ):
        yield Story(cluster, slurm)
