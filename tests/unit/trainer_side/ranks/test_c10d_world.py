"""Rendezvous in a store that earlier starts of the job have used; missing ranks; the job's name."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError, PeerLost
from tests.unit.trainer_side.ranks.test_store_mailbox import SERVER
from trainer_side.ranks.c10d_store import JobStore, append
from trainer_side.ranks.c10d_world import C10dWorld, _launch, _own_rank, _rendezvous

_LAUNCHERS = ("TORCHELASTIC_", "SLURM_", "RANK", "WORLD_SIZE")


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5), wait_for_workers=False)


@pytest.fixture(autouse=True)
def _outside_any_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(_LAUNCHERS):
            monkeypatch.delenv(name)


def meet(server: TCPStore, ranks: int, who: range, seconds_max: float = 60.0) -> dict[int, Any]:
    """Let these ranks meet; return each one's result or error."""
    found: dict[int, Any] = {}

    def work(rank: int) -> None:
        place = f"127.0.0.1:{server.port}"
        job = JobStore(server, place, outlives_ranks=True)
        try:
            found[rank] = _rendezvous(job._replace(store=job.connect(5.0)), rank, ranks, seconds_max)
        except PeerLost as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in who]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return found


def test_each_start_of_a_job_meets_by_itself_in_the_same_store(server: TCPStore) -> None:
    ranks = 4
    first = meet(server, ranks, range(ranks))
    # Left by a rank that was killed before rank 0 had seen it.
    append(PrefixStore("holdfast/meeting", server), "hello", "0123456789abcdef\n")
    second = meet(server, ranks, range(ranks))
    for found in (first, second):
        assert set(found) == set(range(ranks))
        assert len(set(map(str, found.values()))) == 1, found
        assert found[0].hosts == [platform.node()] * ranks
        assert len(bytes.fromhex(found[0].incarnation)) == 16
    assert first[0].incarnation != second[0].incarnation
    assert first[0].launch == second[0].launch


def test_the_name_of_the_first_start_stays_where_the_store_outlives_the_ranks(
    server: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrapper gives each rank a new parent at each start, and rank 0 may move to another host."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(os, "getppid", lambda: 1)
    first = meet(server, 2, range(2))
    monkeypatch.setattr(os, "getppid", lambda: 2)
    second = meet(server, 2, range(2))
    assert first[0].launch == second[0].launch == f"{platform.node()}:1"
    assert first[0].incarnation != second[0].incarnation


def test_absent_ranks_are_named(server: TCPStore) -> None:
    found = meet(server, 14, range(2), seconds_max=0.5)
    assert found[0] == (
        "rank 0 waited 0.5 s for all 14 ranks; rank 2, 3, 4, 5, 6, 7, 8, 9 and 4 more did not come to holdfast"
    )
    assert "rank 1 waited 0.5 s for all 14 ranks; rank 0's log names those" in found[1]


def test_a_rank_does_not_take_an_earlier_rank_0_for_its_own(server: TCPStore) -> None:
    meet(server, 2, range(2))
    found = meet(server, 2, range(1, 2), seconds_max=0.5)
    assert "rank 1 waited 0.5 s for rank 0 to meet it" in found[1]


@pytest.mark.parametrize(
    ("environ", "place", "launch"),
    [
        ({"TORCHELASTIC_RUN_ID": "mine", "SLURM_JOB_ID": "7"}, "node-0:1", "mine"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "7"}, "node-0:1", "7.0"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2"}, "node-0:1", "7.2"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "node-0:1", f"{platform.node()}:{os.getppid()}"),
        ({}, "node-0:1", "node-0:1"),
        ({}, "127.0.0.1:29500", f"{platform.node()}:127.0.0.1:29500"),
        ({}, "", f"{platform.node()}:{os.getppid()}"),
    ],
)
def test_two_jobs_have_two_names_and_two_starts_of_one_job_have_one(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], place: str, launch: str
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert _launch(place) == launch


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2, WORLD_SIZE=2: expected a rank and how many there are"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x"),
        ({"RANK": "0"}, "RANK=0, WORLD_SIZE=none"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, r"srun has started 4 tasks.*RANK=\$SLURM_PROCID"),
    ],
)
def test_an_environment_that_does_not_tell_the_rank_is_refused(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], words: str
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words):
        _own_rank()


@pytest.mark.parametrize("is_stopped", [True, False], ids=["stopped", "not-there"])
def test_a_store_that_does_not_answer_costs_the_time_to_start_and_no_more(
    monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
            for name, value in {**environ, "MASTER_PORT": process.stdout.readline().strip()}.items():
                monkeypatch.setenv(name, value)
            if is_stopped:
                process.send_signal(signal.SIGSTOP)
            else:
                process.kill()
                process.wait()
            lost = r"the store of this job( at 127\.0\.0\.1:\d+ is lost|, which does not answer)"
            with pytest.raises(PeerLost, match=lost):
                C10dWorld(TrainerConfig(start_seconds_max=1.0))
        finally:
            process.kill()
