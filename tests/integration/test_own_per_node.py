"""The main job on two nodes, each of which starts a stager with a share: ranks and a stager killed, nodes swapped.

A node is a host name and a runtime directory of its own; both are on this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.integration.test_own_stager import NEWEST, RANKS, RING, Place, processes
from tests.support.cluster import check_continued, check_loadable, load, same, wait_until
from tests.support.job import Job
from tests.support.main_job import PAUSE_AT, RUN, SAVED, STEPS

pytestmark = [pytest.mark.mpi]
NODES = 2
# Each rank on a node of its own; with SWAPPED=1 rank 0 is on node 1.
_LAUNCH = """
pids=
for rank in 0 1; do
    node=$((rank ^ SWAPPED))
    RANK=$rank NODE=$node HOLDFAST_RUNTIME_DIR=$HOLDFAST_RUNTIME_DIR-$node \
        unshare --uts sh -c 'hostname "node-$NODE"; exec "$@"' sh "$@" &
    pids="$pids $!"
done
for pid in $pids; do
    wait "$pid" || exit 1
done
"""


def why_not() -> str:
    """Why this machine cannot play two nodes; empty if it can."""
    if os.geteuid() != 0:
        return "a host name of one's own needs root"
    if missing := [tool for tool in ("unshare", "hostname") if shutil.which(tool) is None]:
        return f"no {', '.join(missing)} on PATH (packages util-linux, hostname)"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "this machine has no address but loopback"
    return ""


class Nodes(Place):
    """Two nodes, on which jobs of one run start their stagers."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.runtimes = [Path(f"{self.runtime}-{node}") for node in range(NODES)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.env |= {
            "HOLDFAST_STAGER": "own-per-node",
            "HOLDFAST_CHUNK_BYTES": "8KiB",  # so that each stager has some
            "WORLD_SIZE": str(RANKS),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "SWAPPED": "0",
        }

    def start(self, arguments: Sequence[str], *, restarts: int = 0, **env: str) -> Job:
        assert restarts == 0, "nobody starts the ranks again"

        def rewrite(line: list[str]) -> list[str]:
            return ["sh", "-c", _LAUNCH, "sh", *line[line.index(sys.executable) :]]

        return self.cluster.start(
            RANKS,
            *arguments,
            stager=False,
            runtime=self.runtime,
            rewrite=rewrite,
            env=env,
        )

    def processes(self) -> list[psutil.Process]:
        return [process for runtime in self.runtimes for process in processes(runtime)]

    def by_share(self) -> dict[str, int]:
        """The processes of the stagers."""
        found = {}
        for process in self.processes():
            words = process.cmdline()
            if "--own" in words:
                found[words[words.index("--share") + 1]] = process.pid
        return found

    def wait_until_empty(self) -> None:
        def left() -> list[object]:
            return [*self.processes(), *(path for runtime in self.runtimes for path in runtime.glob("*"))]

        wait_until(lambda: not left(), 120, lambda: f"left: {left()}")

    def end(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    if reason := why_not():
        pytest.skip(reason)
    made = Nodes(tmp_path)
    try:
        yield made
    finally:
        made.end()


@pytest.mark.parametrize("swapped", [False, True], ids=["the-same", "swapped"])
def test_each_node_starts_a_stager_and_the_next_start_goes_on_from_the_rings_of_both(
    nodes: Nodes, reference: Path, swapped: bool
) -> None:
    with nodes.start([*RUN, str(PAUSE_AT)]) as job:
        nodes.wait_for_pause(job)
        stagers = nodes.by_share()
        assert set(stagers) == {"1/2", "2/2"}
        nodes.kill_ranks()
        job.wait(120)
    assert nodes.by_share() == stagers, "one died with the ranks"
    with nodes.start(RUN, SWAPPED=str(int(swapped))) as job:
        wait_until(lambda: bool(nodes.events("restore")), 240, job.output)
        assert nodes.by_share() == stagers
        job.succeed(240)
    check_continued(reference, nodes.cluster, 1, 2, start=SAVED + 1, steps=STEPS)
    restores = nodes.events("restore")
    assert [event["step"] for event in restores] == [SAVED] * RANKS
    assert all(set(event["sources"]) == {RING} for event in restores), restores
    nodes.wait_until_empty()
    assert nodes.states()[NEWEST] == "verified"
    files = sorted(nodes.store.glob("step-*.pt"))
    for file in files:
        record = json.loads(file.with_suffix(".json").read_text())["record"]
        assert record["flusher"]["shares"] == NODES, file
    check_loadable(files)


@pytest.mark.parametrize("share", ["1/2", "2/2"])
def test_a_killed_stager_is_started_again_by_its_node(nodes: Nodes, reference: Path, share: str) -> None:
    with nodes.start([*RUN, str(PAUSE_AT)], HOLDFAST_RECONNECT_SECONDS_MAX="1") as job:
        nodes.wait_for_pause(job)
        killed = nodes.by_share()[share]
        os.kill(killed, signal.SIGKILL)
        links = RANKS * (NODES if share == "1/2" else 1)  # the others are left with the lead
        wait_until(lambda: len(nodes.events("stager_back")) == links, 120, job.output)
        assert nodes.by_share()[share] != killed
        (nodes.cluster.out(1) / "go-on").touch()
        job.succeed(240)
        said = job.output()
    root = int(share[0]) - 1
    assert said.count(f"the stager that rank {root} has started has died; it is started again") == 1, said
    for rank in range(RANKS):
        assert same(load(nodes.cluster.out(1) / f"final-{rank}.pt"), load(reference / f"final-{rank}.pt"))
    nodes.wait_until_empty()
    assert nodes.states()[NEWEST] == "verified"
