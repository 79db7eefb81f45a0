"""The default options of the mpirun command."""

from __future__ import annotations

import pytest

from holdfast.mpirun import Stagers, mpirun_command


def _value_of_btl(command: list[str]) -> list[str]:
    return [command[at + 1] for at, word in enumerate(command) if word == "btl"]


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMPI_MCA_btl", raising=False)


def test_on_one_machine_no_fabric_is_looked_for() -> None:
    assert _value_of_btl(mpirun_command(2, ["true"])) == ["^ofi"]


def test_between_hosts_the_fabric_is_left_to_mpi() -> None:
    assert _value_of_btl(mpirun_command(2, ["true"], hosts={"a": 2})) == []


def test_chosen_transports_are_not_overruled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _value_of_btl(mpirun_command(2, ["true"], options=["--mca", "btl", "tcp,self"])) == ["tcp,self"]
    monkeypatch.setenv("OMPI_MCA_btl", "self,sm")
    assert _value_of_btl(mpirun_command(2, ["true"])) == []


def test_several_stagers_are_started_on_their_host() -> None:
    line = mpirun_command(2, ["train"], stager=["stager"], stagers=Stagers(3, "b"), hosts={"a": 2})
    assert line[line.index(":") :] == [":", "--host", "b:3", "-n", "3", "stager"]
