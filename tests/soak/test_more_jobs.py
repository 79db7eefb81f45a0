"""Nightly: jobs of tests/integration in the variants that are left out there."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from operator_side.supervise.exit_codes import RETRY_EXIT_CODE
from tests.integration.test_exit_codes_of_jobs import cluster, codes, signalled
from tests.integration.test_near_reading import RingMachine, restores_after_another_job_filled_the_ring
from tests.integration.test_notice_to_all import plain, saves_the_last_finished_step
from tests.integration.test_peers import CASES, REGULAR, names_what_is_waited_for
from tests.integration.test_rank_in_torchrun import check_a_bug, job
from tests.integration.test_reordered import trains_on_in_another_order
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.mpi]


def test_the_last_finished_step_is_saved_in_local_tiers(tmp_path: Path, plain: list[dict[str, Any]]) -> None:
    saves_the_last_finished_step(tmp_path, plain, "tiers")


def test_ddp_trains_on_in_another_order(tmp_path: Path) -> None:
    trains_on_in_another_order(tmp_path, "ddp")


@pytest.mark.parametrize(("launcher", "case"), sorted(CASES - REGULAR))
def test_a_rank_that_is_waited_for_in_vain_is_named(launcher: str, case: str, tmp_path: Path) -> None:
    names_what_is_waited_for(launcher, case, tmp_path)


def test_repeated_kills_without_a_checkpoint_are_no_preemption(cluster: Cluster) -> None:
    for number, expected in ((1, [RETRY_EXIT_CODE, RETRY_EXIT_CODE]), (2, [9, 128 + signal.SIGKILL])):
        with cluster.start(2, "early", "--restarts-max", "1") as job:
            signalled(cluster, job, signal.SIGKILL)
            assert codes(cluster, job) == expected, f"{number}: {job.output()}"
    assert "2 attempts in a row without a newer checkpoint" in job.output()


def test_a_rank_over_tcp_that_stood_still_while_another_job_filled_the_ring_restores_what_it_was_to(
    tmp_path: Path,
) -> None:
    machine = RingMachine(tmp_path, tcp=True)
    try:
        restores_after_another_job_filled_the_ring(machine)
    finally:
        machine.end()


test_a_bug_of_a_rank_wrapped_in_torchrun_has_its_code = check_a_bug
