"""The stager's welcome is read back completely, or refused, or raises the stager's error."""

from __future__ import annotations

import dataclasses
import json

import pytest

from holdfast.errors import FencedError, ProtocolError, StoreError
from holdfast.wire import frames as wire
from holdfast.wire.failure_count import FailureCount
from holdfast.wire.frames import Frame, Kind
from holdfast.wire.welcome import Welcome

_WELCOME = Welcome("file:///run", 7, 1 << 20, 64, 2, 60.0, 5.0, share=2, shares=3, seen=FailureCount(3, 60.5))


def test_welcome_comes_back() -> None:
    assert Welcome.from_frame(wire.decode(_WELCOME.to_frame())) == _WELCOME


@pytest.mark.parametrize(
    "name", ["attempt", "chunk_bytes", "ring_chunks", "ranks", "beat_seconds", "share", "shares"]
)
def test_welcome_with_nothing_in_it_is_refused(name: str) -> None:
    document = json.loads(wire.decode(_WELCOME.to_frame()).body)
    for value in (0, None, "7"):
        with pytest.raises(ProtocolError):
            Welcome.from_frame(Frame(Kind.WELCOME, body=wire.to_json({**document, name: value})))


def test_a_stager_that_says_nothing_of_failures_has_seen_none() -> None:
    document = json.loads(wire.decode(_WELCOME.to_frame()).body)
    del document["seen"]
    assert Welcome.from_frame(Frame(Kind.WELCOME, body=wire.to_json(document))).seen == FailureCount()


def test_a_stager_that_names_no_ring_has_an_unknown_one() -> None:
    document = json.loads(wire.decode(_WELCOME.to_frame()).body)
    del document["ring"]
    assert Welcome.from_frame(Frame(Kind.WELCOME, body=wire.to_json(document))).ring == ""
    with pytest.raises(ProtocolError, match="ring is 7"):
        Welcome.from_frame(Frame(Kind.WELCOME, body=wire.to_json({**document, "ring": 7})))


@pytest.mark.parametrize(
    "seen", [7, {}, {"failures": 1}, {"failures": -1, "seconds": 1.0}, {"failures": 1, "seconds": 1e99}]
)
def test_failures_that_are_no_two_numbers_are_refused(seen: object) -> None:
    document = json.loads(wire.decode(_WELCOME.to_frame()).body) | {"seen": seen}
    with pytest.raises(ProtocolError, match="failures seen: expected two numbers"):
        Welcome.from_frame(Frame(Kind.WELCOME, body=wire.to_json(document)))


def test_a_share_that_is_not_one_of_them_is_refused() -> None:
    with pytest.raises(ProtocolError, match="share 4 of 3"):
        Welcome.from_frame(wire.decode(dataclasses.replace(_WELCOME, share=4).to_frame()))


def test_a_refused_start_raises_the_stagers_own_error() -> None:
    with pytest.raises(FencedError, match="held by host a"):
        Welcome.from_frame(wire.decode(Welcome.refusal_frame(FencedError("held by host a"))))
    with pytest.raises(StoreError, match="no such bucket"):
        Welcome.from_frame(wire.decode(Welcome.refusal_frame(StoreError("no such bucket"))))
