"""`holdfast run` over two hosts, one of which vanishes: no reset, no goodbye, and mpirun waits for it.

rank 0, 1 on "spot" ── paused, step 7 durable ── the wire is cut ── silent by deadline, spot does not answer: preempted
then two ranks here, from step 7, to the end
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_run import SECONDS_MAX, Run
from tests.support.cluster import load, losses, wait_until
from tests.support.main_job import SAVED, STEPS
from tests.support.two_hosts import TwoHosts, two_hosts, why_not

pytestmark = [pytest.mark.mpi]

_AGENT = """#!/bin/sh
# As ssh: options, host, command. Over there through the namespace, if the wire is whole; here without any.
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1
shift
[ "$host" = {here} ] && exec sh -c "$*"
ip link show {wire} | grep -q 'state UP' || exit 255
exec ip netns exec {name} unshare --uts sh -c "hostname {name}; $*"
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with two_hosts(tmp_path) as made:
        yield made


def test_a_host_that_vanishes_is_a_preemption(tmp_path: Path, hosts: TwoHosts) -> None:
    agent = tmp_path / "agent-of-run"
    agent.write_text(_AGENT.format(here=hosts.here, wire=hosts.wire, name=hosts.name))
    agent.chmod(0o755)
    file = tmp_path / "hosts"
    file.write_text(f"{hosts.there} slots=2\n{hosts.here} slots=2\n")
    run = Run(tmp_path)
    options = (
        *("--hosts", str(file), "--agent", str(agent), "--stager-host", hosts.here, "--min-ranks", "1"),
        *("--mpirun-options", hosts.mpirun_options, "--silent-seconds-max", "2", "--poll-seconds", "600"),
        *("--set", "rank_seconds_max=8", "--export", "PYTHONPATH"),
    )
    try:
        run.main_job(options=options)
        run.pause()
        hosts.cut()
        assert run.wait() == 0, run.said()
        assert [(line["cause"], line["attempt"]) for line in run.status("ended")] == [
            ("preempted", 1),
            ("done", 2),
        ]
        assert f"host {hosts.there} is gone" in run.said()
        assert [line["hosts"] for line in run.status("launched")] == [
            [f"{hosts.there}:2"],
            [f"{hosts.here}:2"],
        ]
        for rank in range(2):
            assert load(run.cluster.out(2) / f"final-{rank}.pt")["start"] == SAVED + 1
            assert set(losses(run.cluster.out(2) / f"losses-{rank}")) == set(range(SAVED + 1, STEPS))
        # The processes in the namespace live on, unreachable. A cloud would have ended them with the host.

        def here() -> list[str]:
            return [line for line in run.living() if int(line.partition(":")[0]) not in hosts.pids()]

        wait_until(lambda: not here(), SECONDS_MAX, lambda: f"still there: {here()}")
    finally:
        if run.process is not None and run.process.poll() is None:
            run.process.send_signal(signal.SIGKILL)
        run.close()
