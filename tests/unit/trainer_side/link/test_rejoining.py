"""The search for a lost stager: attempts, generations, the end of the search, and messages to the user."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from holdfast.errors import ConfigError, HoldfastError, PeerLost
from holdfast.image.shares import LOST_STAGER_SECONDS_MAX
from holdfast.wire.frames import Kind
from holdfast.wire.welcome import Welcome
from tests.unit.trainer_side.stager_port import CHUNK, SECONDS_MAX, FakePort, until
from trainer_side.background_thread import ThreadDied
from trainer_side.link import rejoining
from trainer_side.link.job_state import JobState
from trainer_side.link.rejoining import Reconnect, RejoinedStager, Rejoining
from trainer_side.ranks.ports import GenerationOver, StartReplaced

BEFORE = Welcome("file:///run", 1, CHUNK, 8, 2, 60.0, 5.0)
AFTER = Welcome("file:///run", 2, CHUNK, 8, 2, 60.0, 5.0)
Answer = Welcome | Exception | None


class Door:
    """Returns these answers in turn: an error, or a port whose stager sends this; None: the stager stays silent."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self.generations: list[int] = []
        self.ports: list[FakePort] = []

    def __call__(self, generation: int) -> FakePort:
        self.generations.append(generation)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        port = FakePort()
        if answer is not None:
            port.inbox.append(answer.to_frame())
        self.ports.append(port)
        return port


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejoining, "_PAUSE_SECONDS_MIN", 1e-3)
    monkeypatch.setattr(rejoining, "_PAUSE_SECONDS_MAX", 2e-3)


def _rejoining(again: Reconnect, rank: int) -> Rejoining:
    job = JobState(rank, 2, store_url="file:///run", chunk_bytes=CHUNK, attempt=1)
    return Rejoining(again, job, start_seconds_max=SECONDS_MAX, last_step=lambda: 40, fallback_text="")


@pytest.fixture
def search() -> Iterator[Callable[..., Rejoining]]:
    begun: list[Rejoining] = []

    def begin(door: Door, *, rank: int = 0, newest: int = 1) -> Rejoining:
        made = _rejoining(Reconnect(door, lambda: newest), rank)
        made.begin(BEFORE)
        begun.append(made)
        return made

    yield begin
    for one in begun:
        one.end()


def _found(search: Rejoining) -> RejoinedStager:
    found: list[RejoinedStager] = []

    def look() -> bool:
        found.extend(filter(None, [search.poll()]))
        return bool(found)

    until(look)
    return found[0]


Search = Callable[..., Rejoining]


def test_a_failed_answer_is_retried_as_the_same_generation(search: Search) -> None:
    door = Door(PeerLost("not there"), ConfigError("it serves another job"), AFTER)
    found = _found(search(door))
    assert (found.greeted.welcome, found.tries) == (AFTER, 3)
    assert found.greeted.port is door.ports[0]
    assert door.ports[0].of(Kind.HELLO)
    assert door.generations == [1, 1, 1]


def test_a_generation_that_is_over_is_followed_by_the_next_without_a_pause(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejoining, "_PAUSE_SECONDS_MIN", 10 * SECONDS_MAX)
    door = Door(GenerationOver("over"), GenerationOver("over"), AFTER)
    _found(search(door))
    assert door.generations == [1, 2, 3]


def test_pauses_stay_short_while_the_share_of_one_of_several_stagers_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rejoining, "_PAUSE_SECONDS_MAX", 30.0)
    made = _rejoining(Reconnect(Door(AFTER), lambda: 1), rank=1)
    made._before = BEFORE
    assert made._pause_seconds_max(0.0) == 30.0, "the only stager"
    made._before = dataclasses.replace(BEFORE, share=2, shares=2)
    assert made._pause_seconds_max(0.0) < 10.0
    assert made._pause_seconds_max(LOST_STAGER_SECONDS_MAX) == 30.0


def test_each_loss_is_another_generation(search: Search) -> None:
    door = Door(AFTER)
    searching = search(door)
    _found(searching)
    searching.begin(AFTER)
    _found(searching)
    assert door.generations == [1, 2]


@pytest.mark.parametrize(
    "other",
    [
        Welcome("file:///other", 2, CHUNK, 8, 2, 60.0, 5.0),
        Welcome("file:///run", 2, 2 * CHUNK, 8, 2, 60.0, 5.0),
    ],
    ids=["run", "chunks"],
)
def test_a_stager_of_another_run_is_left_and_named(
    search: Search, caplog: pytest.LogCaptureFixture, other: Welcome
) -> None:
    caplog.set_level(logging.INFO, "holdfast.trainer.link")
    door = Door(other, AFTER)
    assert _found(search(door)).greeted.port is door.ports[1]
    assert door.ports[0].left
    assert door.generations == [1, 2], "the first was admitted"
    assert (
        f"writes {other.store_url} in chunks of {other.chunk_bytes} bytes, expected file:///run"
        in caplog.text
    )


def test_the_end_of_the_job_ends_a_search_that_waits_for_an_answer(search: Search) -> None:
    door = Door(None)
    searching = search(door)
    until(lambda: door.ports and door.ports[0].of(Kind.HELLO))
    searching.end()
    until(lambda: door.ports[0].left)
    tries = len(door.generations)
    until(lambda: not any(thread.name == "holdfast-rejoin" for thread in threading.enumerate()))
    assert len(door.generations) == tries


def test_a_stager_that_was_found_and_is_not_wanted_hears_a_good_bye(search: Search) -> None:
    door = Door(AFTER)
    searching = search(door)
    until(lambda: not searching._found.empty())
    searching.end()
    assert door.ports[0].left


def test_a_long_search_says_what_is_at_risk_and_each_cause_once(
    search: Search, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "holdfast.trainer.link")
    monkeypatch.setattr(rejoining, "_WARNING_SECONDS", 0.0)
    door = Door(PeerLost("nobody is there"))
    search(door)
    until(lambda: caplog.text.count("training has done step 40") > 2)
    assert caplog.text.count("rank 0 does not reach the stager yet: nobody is there") == 1
    assert "tries to reach it; the last: nobody is there); training has done step 40" in caplog.text


def test_a_search_that_dies_by_a_bug_says_so(search: Search) -> None:
    searching = search(Door(ZeroDivisionError("a bug")))
    until(lambda: not searching._found.empty())
    with pytest.raises(ThreadDied, match="tries to reach the stager again, has ended by ZeroDivisionError"):
        searching.poll()


def test_an_error_of_the_stager_itself_is_tried_again(search: Search) -> None:
    door = Door(AFTER)
    refusing = FakePort()
    refusing.inbox.append(Welcome.refusal_frame(HoldfastError("no store")))
    answers = iter([refusing])

    def connect(generation: int) -> FakePort:
        return next(answers, None) or door(generation)

    searching = _rejoining(Reconnect(connect, lambda: 0), rank=1)
    searching.begin(BEFORE)
    try:
        assert _found(searching).tries == 2
        assert refusing.left
        assert door.generations == [2]
    finally:
        searching.end()


def test_a_start_that_was_replaced_is_not_tried_again(
    search: Search, caplog: pytest.LogCaptureFixture
) -> None:
    door = Door(PeerLost("nobody is there"), StartReplaced("its job was started again"), AFTER)
    searching = search(door)
    until(lambda: "no checkpoints are taken in this start any more" in caplog.text)
    until(lambda: not any(thread.name == "holdfast-rejoin" for thread in threading.enumerate()))
    assert searching.poll() is None
    assert len(door.generations) == 2


def test_a_start_after_which_another_one_has_saved_stays_out(
    search: Search, caplog: pytest.LogCaptureFixture
) -> None:
    """The stager is new, and knows neither start. Rank 0 looks for all: without it no step is taken."""
    door = Door(AFTER)
    searching = search(door, newest=BEFORE.attempt + 1)
    until(lambda: "another start of it has gone on since" in caplog.text)
    assert door.ports[0].left
    assert searching.poll() is None
    _found(search(Door(AFTER), rank=1, newest=BEFORE.attempt + 1))
