"""Memory that is made ahead: an early caller waits only for its own piece."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable

import pytest
import torch

from tests.unit.trainer_side.tiers.ranks import until
from trainer_side.save.host_memory import MemoryPreallocator

SECONDS = 60


class Bench:
    """Pieces of memory, made when the test allows each."""

    def __init__(self, pieces: int) -> None:
        self.may = [threading.Event() for _ in range(pieces)]
        self.begun: list[tuple[int, str]] = []
        self.made: list[weakref.ref[torch.Tensor]] = []

    def makes(self) -> dict[int, Callable[[], torch.Tensor]]:
        return {number: functools.partial(self.make, number) for number in range(len(self.may))}

    def make(self, number: int) -> torch.Tensor:
        self.begun.append((number, threading.current_thread().name))
        assert self.may[number].wait(SECONDS)
        memory = torch.full((4,), number)
        self.made.append(weakref.ref(memory))
        return memory

    def alive(self) -> list[int]:
        return [int(memory[0]) for one in self.made if (memory := one()) is not None]


def test_pieces_are_made_in_order_beside_the_training_thread_and_each_is_given_once() -> None:
    bench = Bench(3)
    for event in bench.may:
        event.set()
    ahead = MemoryPreallocator(bench.makes())
    until(lambda: len(bench.made) == 3)
    assert bench.begun == [(number, "holdfast-memory") for number in range(3)]
    taken = [ahead.claim(number) for number in (2, 0, 1)]
    assert [int(one[0]) for one in taken if one is not None] == [2, 0, 1]
    assert ahead.claim(1) is None
    assert ahead.claim(7) is None
    ahead.close(SECONDS)


def test_a_piece_that_is_not_begun_is_made_at_once_whatever_the_thread_is_at() -> None:
    bench = Bench(3)
    ahead = MemoryPreallocator(bench.makes())
    until(lambda: bench.begun)
    bench.may[2].set()
    taken = ahead.claim(2)
    assert taken is not None
    assert bench.begun[1] == (2, threading.current_thread().name)
    bench.may[0].set()
    taken = ahead.claim(0)
    assert taken is not None
    assert int(taken[0]) == 0
    bench.may[1].set()
    ahead.close(SECONDS)


@pytest.mark.parametrize("waits", [False, True])
def test_memory_made_for_a_caller_that_left_is_given_back(waits: bool) -> None:
    bench = Bench(3)
    ahead = MemoryPreallocator(bench.makes())
    until(lambda: bench.begun)
    if waits:
        threading.Timer(0.05, bench.may[0].set).start()
        ahead.close(SECONDS)
    else:
        ahead.stop()
        bench.may[0].set()
        until(lambda: bench.made)
    until(lambda: not bench.alive())
    assert [number for number, _ in bench.begun] == [0]


def test_an_error_is_raised_where_the_piece_is_taken_and_the_others_are_made() -> None:
    def refuse() -> torch.Tensor:
        raise MemoryError("none left")

    ahead = MemoryPreallocator({1: refuse, 2: lambda: torch.zeros(2)})
    ahead._thread.join(SECONDS)  # type: ignore[union-attr]
    with pytest.raises(MemoryError, match="none left"):
        ahead.claim(1)
    assert ahead.claim(2) is not None
