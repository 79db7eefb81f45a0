"""The network of tests/hosts, where a Slurm can be played."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.network import Network, running_network
from tests.slurm.slurm import why_not


@pytest.fixture(scope="session")
def network() -> Iterator[Network]:
    """A bridge; the tests are skipped where there is no Slurm, or no host can be made."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with running_network() as made:
        yield made
