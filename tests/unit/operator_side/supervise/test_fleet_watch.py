"""The thread that polls for hosts, and the loop that waits for its answer."""

from __future__ import annotations

from pathlib import Path

from operator_side.supervise.hosts import Host
from operator_side.supervise.job_processes import JobProcesses, RunFiles
from operator_side.supervise.supervisor import FleetWatch

_LOOKS = 3


class CountedFleet:
    """Has one more host at each poll."""

    name = "a fleet that is counted"

    def __init__(self) -> None:
        self.looks = 0

    def list_hosts(self) -> tuple[Host, ...]:
        self.looks += 1
        return tuple(Host(f"h{number}", 1) for number in range(self.looks))

    def request_hosts(self, wanted: int) -> None:
        """It grows by itself."""


def test_an_answer_wakes_the_loop_between_two_attempts(tmp_path: Path) -> None:
    """The wait that is given has no end that the test would live to see."""
    fleet = CountedFleet()
    watch = FleetWatch(fleet, poll_seconds=3600.0)
    files = RunFiles((tmp_path / "ring",), tmp_path / "logs", tmp_path / "events")
    job = JobProcesses(lambda _: [], {}, files, lambda *_: None)
    watch.start()
    seen = []
    try:
        for _ in range(_LOOKS):
            watch.poll_now(0)
            job.wait(3600.0, watch.fileno())
            seen += [len(hosts or ()) for hosts in watch.drain_results()]
    finally:
        watch.stop()
        watch.join(30.0)
    assert seen == [1, 2, 3]
    assert list(watch.drain_results()) == []
