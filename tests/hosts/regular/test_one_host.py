"""The shortest story of whole hosts; takes well under a minute."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.checks import check_done_twice, resumed_at
from tests.hosts.cluster import RING, cluster_of
from tests.hosts.network import Network

pytestmark = [pytest.mark.mpi]


@pytest.mark.timeout(400)
def test_the_only_trainer_dies(tmp_path: Path, network: Network) -> None:
    """One host's power is cut, and an empty one takes its place."""
    with cluster_of(tmp_path, network, None, trainers=1, spares=1) as cluster:
        cluster.run(1)
        cluster.boot("t2")
        cluster.until_paused()
        cluster.offer("t2")
        cluster.kill("t1")
        cluster.done()
        start = resumed_at(cluster, ranks=1)
        check_done_twice(cluster, start, ranks=1)
        assert cluster.restored_from() == [{RING}]
        cluster.assert_nothing_left()
