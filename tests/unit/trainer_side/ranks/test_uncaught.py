"""One rank reports an uncaught error, and every rank ends with the exit code of its class."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict

import pytest

from holdfast.errors import ConfigError, HoldfastError, PeerLost, StateError
from operator_side.supervise.job_output import find_exception
from trainer_side.ranks.uncaught import must_print


class Ports:
    """Ranks that fail one after the other; what was sent waits for its reader."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.waiting: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
        self.sent = 0

    def of(self, rank: int) -> Port:
        return Port(self, rank)


class Port:
    def __init__(self, ports: Ports, rank: int) -> None:
        self._ports, self.rank, self.ranks = ports, rank, ports.ranks

    def send(self, rank: int, message: bytes) -> None:
        self._ports.sent += 1
        self._ports.waiting[rank].append((self.rank, message))

    def poll(self) -> list[tuple[int, bytes]]:
        found, self._ports.waiting[self.rank] = self._ports.waiting[self.rank], []
        return found


def speakers(errors: dict[int, HoldfastError], ranks: int) -> list[int]:
    ports = Ports(ranks)
    return [rank for rank, error in errors.items() if must_print(ports.of(rank), error, seconds_max=0.05)]


def test_an_error_that_all_ranks_raise_is_said_by_rank_0() -> None:
    assert speakers({rank: ConfigError("no such store") for rank in range(4)}, 4) == [0]


def test_the_rank_that_met_it_and_those_that_were_told_of_it_say_the_same() -> None:
    errors: dict[int, HoldfastError] = {
        0: StateError("rank 1: model/w is torn"),
        1: StateError("model/w is torn"),
    }
    assert speakers(errors, 2) == [0]


def test_the_lowest_affected_rank_says_it() -> None:
    assert speakers({rank: StateError("not mine") for rank in (2, 3, 5)}, 8) == [2]


def test_different_errors_are_all_said() -> None:
    assert speakers({0: StateError("one"), 1: StateError("two"), 2: PeerLost("one")}, 3) == [0, 1, 2]


def test_thousands_of_ranks_do_not_send_each_other_millions_of_messages() -> None:
    ports = Ports(2000)
    errors = {rank: ConfigError("no") for rank in range(ports.ranks)}
    assert [rank for rank, error in errors.items() if must_print(ports.of(rank), error, seconds_max=1)] == [0]
    assert ports.sent < 20 * ports.ranks


_SCRIPT = """
import atexit
from holdfast.errors import {kind} as Kind
from trainer_side.ranks.uncaught import install_exit_code_hook
atexit.register(print, "left in order")
install_exit_code_hook()
install_exit_code_hook()
raise Kind("what is wrong")
"""


@pytest.mark.parametrize(("kind", "code"), [("StateError", 3), ("FencedError", 8)])
def test_an_uncaught_error_is_one_message_and_its_exit_code(kind: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(kind=kind)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (code, "left in order\n")
    said = done.stderr.split("\n")
    assert said[1].startswith(f"holdfast: rank 0: {kind}: what is wrong (at <string>:8)"), said
    assert said[2].startswith("help: holdfast explain ")
    assert "Traceback" not in done.stderr
    assert find_exception(said) == f"holdfast.errors.{kind}"


def test_every_other_exception_is_left_alone() -> None:
    script = _SCRIPT.format(kind="HoldfastError").replace("Kind(", "ValueError(")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("ValueError: what is wrong\n")
