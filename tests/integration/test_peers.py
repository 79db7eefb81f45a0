"""`Peers` over MPI and over gloo: one suite, in real jobs of three ranks; ranks that die or stay away."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs import peers
from tests.support.job import environment
from tests.support.torchrun import launch_command

pytestmark = [pytest.mark.mpi]
RANKS = 3


@pytest.fixture(params=["mpirun", "torchrun"])
def launcher(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(launcher: str, case: str, directory: Path) -> tuple[int, str]:
    done = subprocess.run(
        launch_command(launcher, RANKS, [peers.__file__, case, str(directory)]),
        env=environment(directory / "runtime"),
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    return done.returncode, done.stdout + done.stderr


def seen(directory: Path, case: str, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / f"{case}-{rank}.json").read_text())
    return found


def test_bytes_reach_all_ranks_and_one_rank(launcher: str, tmp_path: Path) -> None:
    code, said = run(launcher, "small,shared,passed", tmp_path)
    assert code == 0, said
    for rank in range(RANKS):
        found = seen(tmp_path, "small", rank)
        assert found["heard"] == [True] * 9
        assert found["agreed"] == [True, False, False]
        assert found["said"] == [0, 1, 2]
        assert found["world"] == [rank, RANKS, rank, True, False]
        assert found["kind"] == {"mpirun": "MpiPeers", "torchrun": "C10dPeers"}[launcher]
        assert seen(tmp_path, "shared", rank) == {"same": [True] * RANKS, "between": "between"}
        assert seen(tmp_path, "passed", rank) == {"same": [True] * 5, "kept": 4}


@pytest.mark.parametrize("initialised", [False, True], ids=["alone", "initialised"])
def test_ranks_that_have_the_variables_alone_meet_at_rank_0(initialised: bool, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = environment(tmp_path / "runtime", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2")
    if initialised:
        env["PEERS_INIT"] = "1"
    command = [sys.executable, peers.__file__, "small", str(tmp_path)]
    with (tmp_path / "log").open("wb") as log, ExitStack() as stack:
        ranks = [
            subprocess.Popen(command, env={**env, "RANK": str(rank)}, stdout=log, stderr=log)
            for rank in range(2)
        ]
        for process in ranks:
            stack.callback(process.wait)
            stack.callback(process.kill)
        codes = [process.wait(240) for process in ranks]
    assert codes == [0, 0], (tmp_path / "log").read_text()
    for rank in range(2):
        found = seen(tmp_path, "small", rank)
        assert found["heard"] == [True] * 6
        assert found["said"] == [0, 1]
        assert found["world"] == [rank, 2, rank, True, False]
        assert found["kind"] == "C10dPeers"


# tests/soak/test_more_jobs.py has the others.
CASES = {
    *product(("mpirun", "torchrun"), ("dead_in_share", "dead_sender", "silent_in_share", "silent_sender"))
}
REGULAR = {("mpirun", "silent_sender"), ("torchrun", "dead_in_share")}


@pytest.mark.parametrize(("launcher", "case"), sorted(REGULAR))
def test_a_rank_that_is_waited_for_in_vain_is_named_by_what_it_would_do(
    launcher: str, case: str, tmp_path: Path
) -> None:
    names_what_is_waited_for(launcher, case, tmp_path)


def names_what_is_waited_for(launcher: str, case: str, tmp_path: Path) -> None:
    """Ranks 0 and 2 wait for rank 1, which does not come."""
    _, said = run(launcher, case, tmp_path)
    for rank in (0, 2):
        found = seen(tmp_path, case, rank)
        assert "piece" in found["error"] or "message between rank" in found["error"], (found, said)
        assert found["seconds"] < 2 * peers.SHORT_SECONDS + 3, found
