"""Which offers are accepted; a refusal names its cause."""

from __future__ import annotations

import pytest

from holdfast.config import IN_FLIGHT_MAX
from holdfast.wire.frames import Kind
from stager.session.checkpoint import Phase
from stager.session.session_messages import Offer, SendMessage
from tests.unit.stager.session.sessions import Stager, make_layout, phases_of


@pytest.fixture
def stager() -> Stager:
    return Stager(make_layout())


def test_different_layouts_are_refused_with_rank_and_digests(stager: Stager) -> None:
    stager.take(Offer(0, 1, stager.layout.digest))
    (tell,) = stager.take(Offer(1, 1, "f" * 64))
    assert isinstance(tell, SendMessage)
    assert (tell.kind, tell.body["code"]) == (Kind.FAILED, "state")
    assert "rank 1" in tell.body["message"]
    assert "f" * 16 in tell.body["message"]


def test_a_layout_that_nobody_announced_is_refused(stager: Stager) -> None:
    stager.take(Offer(0, 1, "e" * 64))
    (tell,) = stager.take(Offer(1, 1, "e" * 64))
    assert isinstance(tell, SendMessage)
    assert tell.body["code"] == "protocol"


def test_an_older_step_is_refused(stager: Stager) -> None:
    stager.offer_all(9)
    (tell,) = stager.take(Offer(0, 8, stager.layout.digest))
    assert isinstance(tell, SendMessage)
    assert tell.kind is Kind.DECLINED
    assert "older than step 9" in tell.body["reason"]


def test_an_offer_beyond_the_steps_in_flight_is_declined(stager: Stager) -> None:
    for step in range(IN_FLIGHT_MAX):
        stager.offer_all(step)
        assert phases_of(stager.session)[step] is Phase.RECEIVING
    (tell,) = stager.take(Offer(0, IN_FLIGHT_MAX, stager.layout.digest))
    assert isinstance(tell, SendMessage)
    assert (tell.rank, tell.kind) == (None, Kind.DECLINED)
    assert "steps 0, 1, 2" in tell.body["reason"]


def test_refusing_all_ends_everything_and_every_later_offer(stager: Stager) -> None:
    stager.offer_all(1)
    stager.session.refuse_all("the flusher ended")
    (tell,) = stager.take(Offer(0, 2, stager.layout.digest))
    assert isinstance(tell, SendMessage)
    assert tell.body["reason"] == "the flusher ended"
