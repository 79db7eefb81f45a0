"""The end of a rank: it waits for the last step, and a newest step that is not durable is an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from holdfast.errors import NotDurable, PeerLost
from tests.unit.trainer_side import test_checkpointer
from tests.unit.trainer_side.test_checkpointer import FakeLink
from trainer_side import joining


class EndingLink(FakeLink):
    """A link that makes offered steps durable when it is closed, up to a limit of the test."""

    lasts = 99

    def close(self, **_: Any) -> None:
        taken = [step for step in self.offers if step not in self.declined and step <= self.lasts]
        self.job.durable_step = max(taken, default=-1)


class Rank(test_checkpointer.Rank):
    """As it is with the settings that are shipped."""

    def __init__(self, link: FakeLink, **settings: Any) -> None:
        super().__init__(link, **{"on_not_durable": "fail", "close_seconds_max": 60.0, **settings})


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> EndingLink:
    found = EndingLink()
    monkeypatch.setattr(joining, "connect_stager", found.meet)
    return found


@pytest.fixture
def soon() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Call a function a moment later, on another thread."""
    timers: list[threading.Timer] = []

    def later(act: Callable[[], None]) -> None:
        timers.append(threading.Timer(0.2, act))
        timers[-1].start()

    yield later
    for timer in timers:
        timer.join()


def test_the_last_step_is_waited_for_and_saved_as_it_was(
    link: EndingLink, soon: Callable[[Callable[[], None]], None]
) -> None:
    rank = Rank(link)
    assert [rank.save(0), rank.save(1)] == [True, False]
    assert link.declined == {}
    soon(lambda: link.stage(0))
    rank.checkpointer.close()
    assert link.declined == {}
    assert rank.holds(1)
    assert rank.checkpointer.stats.saved == 2


def _next_step(rank: Rank) -> None:
    rank.checkpointer.step(2)


def _next_save(rank: Rank) -> None:
    rank.save(2)


def _next_update(rank: Rank) -> None:
    rank.checkpointer._copier.gate.wait()
    rank.optimizer.step()  # type: ignore[attr-defined]


@pytest.mark.parametrize("goes_on", [_next_step, _next_save, _next_update])
def test_a_step_without_room_is_declined_when_training_goes_on(
    link: EndingLink, goes_on: Callable[[Rank], None]
) -> None:
    rank = Rank(link)
    if goes_on is _next_update:
        rank.checkpointer._seat.release()
        rank.optimizer = torch.optim.SGD(rank.model.parameters(), lr=0.1)  # type: ignore[attr-defined]
        state = {"model": rank.model, "optimizer": rank.optimizer}  # type: ignore[attr-defined]
        rank.checkpointer = type(rank.checkpointer)(state, config=rank.checkpointer._config)
    assert [rank.save(0), rank.save(1)] == [True, False]
    assert link.declined == {}
    goes_on(rank)
    assert 1 in link.declined
    link.stage(0)


def test_a_last_step_whose_state_has_changed_is_declined_by_that_name(link: EndingLink) -> None:
    rank = Rank(link)
    rank.save(0)
    rank.save(1)
    link.stage(0)
    rank.checkpointer._copier.gate.wait()
    with torch.no_grad():
        rank.model[3].add_(1)
    with pytest.raises(
        NotDurable, match="step 1, the newest that was to be saved, is not durable; step 0 is; "
    ):
        rank.checkpointer.close()
    assert "model/3 was changed after step 1" in link.declined[1].text


def test_the_end_says_which_step_is_not_durable(link: EndingLink) -> None:
    rank = Rank(link, in_flight_max=2)
    for step in range(2):
        assert rank.save(step)
        link.stage(step)
    link.lasts, link.job.staged_step = 0, 1
    with pytest.raises(
        NotDurable,
        match=r"step 1, .* is not durable; step 0 is; it is staged, and the flusher finishes it alone",
    ):
        rank.checkpointer.close()


def test_a_stager_that_was_lost_before_the_last_step_is_said(link: EndingLink) -> None:
    rank = Rank(link)
    assert rank.save(0)
    link.stage(0)
    link.job.problem = PeerLost("its process is dead")
    assert not rank.save(1)
    with pytest.raises(NotDurable, match=r"step 1, .*; the stager is lost \(its process is dead\)"):
        rank.checkpointer.close()


def test_a_stager_that_was_lost_after_the_last_step_was_durable_costs_nothing(link: EndingLink) -> None:
    rank = Rank(link)
    assert rank.save(0)
    link.stage(0)
    link.job.problem = PeerLost("its process is dead")
    rank.checkpointer.close()


def test_on_not_durable_warn_only_logs(link: EndingLink, caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank(link, on_not_durable="warn")
    assert rank.save(0)
    link.stage(0)
    link.lasts = -1
    rank.checkpointer.close()
    assert "step 0, the newest that was to be saved, is not durable; nor is any other" in caplog.text


def test_an_exception_of_the_script_stays_what_it_is(link: EndingLink) -> None:
    rank = Rank(link)
    link.lasts = -1
    begun = time.monotonic()

    def train() -> None:
        with rank.checkpointer:
            rank.save(0)
            rank.save(1)
            link.stage(0)
            raise ValueError("of the script")

    with pytest.raises(ValueError, match="of the script"):
        train()
    assert 1 in link.declined
    assert time.monotonic() - begun < 10.0
