"""Trainers are welcomed when what earlier jobs have staged is durable, or has been waited for long enough."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from holdfast.ring import Ring
from stager.inheritance import Inheritance

DIGEST = "0" * 64


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    with Ring.create(directory, chunk_bytes=4096, ring_chunks=8, attempt=2) as ring:
        yield ring


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _left(ring: Ring, attempt: int, step: int, state: Literal["receiving", "staged"]) -> None:
    ring.write_checkpoint(attempt, step, state, DIGEST, {})


def test_a_staged_one_is_waited_for(ring: Ring) -> None:
    inheritance = Inheritance(10, clock=Clock())
    _left(ring, 1, 7, "staged")
    assert not inheritance.settled(ring, 2)
    assert not inheritance.settled(ring, 2)
    ring.remove_checkpoint(1, 7)
    assert inheritance.settled(ring, 2)


def test_a_partial_one_and_this_jobs_own_are_not(ring: Ring) -> None:
    _left(ring, 1, 7, "receiving")
    _left(ring, 2, 8, "staged")
    assert Inheritance(10, clock=Clock()).settled(ring, 2)


def test_one_that_cannot_be_read_is_not(ring: Ring) -> None:
    (ring.directory / "checkpoint-1-7.json").write_bytes(b"{")
    (ring.directory / "checkpoint-1-7.json").chmod(0o600)
    assert Inheritance(10, clock=Clock()).settled(ring, 2)


def test_the_wait_ends_and_says_what_was_not_waited_for(ring: Ring, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    inheritance = Inheritance(10, clock=clock)
    _left(ring, 1, 7, "staged")
    assert not inheritance.settled(ring, 2)
    clock.now = 9.9
    assert not inheritance.settled(ring, 2)
    clock.now = 10.0
    with caplog.at_level(logging.ERROR):
        assert inheritance.settled(ring, 2)
    assert "step 7" in caplog.text
    assert inheritance.settled(ring, 2), "once is enough: what comes later is not held up again"
