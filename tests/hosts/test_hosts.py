"""Whole hosts are lost under `holdfast run`, which continues by itself on the remaining hosts.

Three trainers' hosts and a stager's, each with its own address, link (tbf), sshd, metadata service, memory and disk;
the store is OpenStack Swift behind the same network. `make hosts` runs them; `make check` runs only the story of
tests/hosts/regular.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.checks import check_done_twice, check_same_bits, check_samples, resumed_at
from tests.hosts.cluster import EVERY, RING, cluster_of
from tests.hosts.network import Network
from tests.hosts.times import keep
from tests.support.s3_place import S3Place

pytestmark = [pytest.mark.mpi, pytest.mark.s3, pytest.mark.timeout(900)]


def test_death_without_notice(tmp_path: Path, network: Network, place: S3Place) -> None:
    """One host's power is cut, and an empty one takes its place."""
    with cluster_of(tmp_path, network, place, spares=1) as cluster:
        cluster.run(3)
        cluster.boot("t4")
        cluster.until_paused()
        cluster.offer("t1", "t3", "t4")
        cluster.kill("t2")
        cluster.done()
        start = resumed_at(cluster, ranks=3)
        check_done_twice(cluster, start, ranks=3)
        check_samples(cluster, start, (3, 3))
        cluster.assert_nothing_left()
        keep(cluster, "death without notice, an empty host instead", start=start)


def test_notice_then_death(tmp_path: Path, network: Network, place: S3Place, reference: Path) -> None:
    """The metadata service of one host announces it; the step saved because of that is not lost."""
    with cluster_of(tmp_path, network, place, spares=1) as cluster:
        cluster.run(3, pace_seconds=1)
        cluster.boot("t4")
        cluster.until("staged")
        cluster.notice("t2", seconds=60)
        saved = cluster.until("emergency_staged")["saved_step"]
        cluster.offer("t1", "t3", "t4")
        cluster.kill("t2")
        cluster.done()
        start = resumed_at(cluster, ranks=3)
        assert start > saved
        assert "t2" in cluster.events("notice")[0]["name"]
        check_same_bits(cluster, reference, start)
        check_samples(cluster, start, (3, 3))
        cluster.assert_nothing_left()
        keep(cluster, "notice, then death, an empty host instead", start=start)


def test_link_down(tmp_path: Path, network: Network, place: S3Place) -> None:
    """A host is unreachable and not replaced: fewer ranks. When it is back, nothing is left on it."""
    with cluster_of(tmp_path, network, place) as cluster:
        cluster.run(3, ranks_min=2, pace_seconds=1)
        cluster.until("durable")
        cluster.vanish("t2")
        cluster.done()
        start = resumed_at(cluster, ranks=2)
        check_samples(cluster, start, (3, 2))
        cluster.host("t2").come_back()
        cluster.assert_nothing_left()
        keep(cluster, "link down, fewer ranks", start=start)


def test_all_trainers_are_gone(tmp_path: Path, network: Network, place: S3Place, reference: Path) -> None:
    """All at once, as soon as a step is staged; empty hosts replace them, and read the step from the stager's ring."""
    with cluster_of(tmp_path, network, place, spares=3) as cluster:
        cluster.run(3, pace_seconds=1)
        cluster.boot("t4", "t5", "t6")
        staged = cluster.until("staged", step=EVERY - 1)["step"]
        cluster.offer("t4", "t5", "t6")
        cluster.kill("t1", "t2", "t3")
        cluster.done()
        start = resumed_at(cluster, ranks=3)
        assert start > staged
        assert cluster.restored_from() == [{RING}] * 3
        check_same_bits(cluster, reference, start)
        check_samples(cluster, start, (3, 3))
        cluster.assert_nothing_left()
        keep(cluster, "all trainers gone, empty hosts instead", start=start)


def test_the_stagers_host_restarts(tmp_path: Path, network: Network, place: S3Place, reference: Path) -> None:
    """Ring, flusher, mpirun and supervisor are lost with its memory: the same command continues from the store."""
    with cluster_of(tmp_path, network, place) as cluster:
        cluster.run(3, pace_seconds=1)
        durable = cluster.until("durable")["step"]
        cluster.kill("stager")
        cluster.boot("stager")
        cluster.run(3, pace_seconds=1)
        cluster.done()
        start = resumed_at(cluster, ranks=3)
        assert start > durable
        check_same_bits(cluster, reference, start)
        check_samples(cluster, start, (3, 3))
        cluster.assert_nothing_left()
        keep(cluster, "the stager's host restarts", start=start)


def test_more_ranks_afterwards(tmp_path: Path, network: Network, place: S3Place) -> None:
    """The run begins with the two existing hosts; one dies, and two fresh ones come."""
    with cluster_of(tmp_path, network, place, trainers=2, spares=2) as cluster:
        cluster.run(3, ranks_min=2)
        cluster.boot("t3", "t4")
        cluster.until_paused()
        cluster.offer("t1", "t3", "t4")
        cluster.kill("t2")
        cluster.done()
        start = resumed_at(cluster, ranks=3)
        check_samples(cluster, start, (2, 3))
        cluster.assert_nothing_left()
        keep(cluster, "death without notice, more ranks", start=start)
