"""The stager's answers to the ranks' proposals."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from holdfast.errors import StateError
from holdfast.wire.frames import Kind
from holdfast.wire.state_messages import Agreement, Proposal
from tests.unit.trainer_side.stager_port import FakePort, until
from trainer_side.link.link import Link


def _agree(link: Link, port: FakePort, kind: Kind, body: dict[str, Any]) -> Agreement:
    def answer() -> None:
        until(lambda: port.of(Kind.PROPOSE))
        port.say(kind, body=body)

    threading.Thread(target=answer).start()
    return link.agree(Proposal("digest", [["a", "float32", [1], -1]], 10, {"rng": 5}))


def test_an_open_request_gets_the_stagers_agreement(link: Link, port: FakePort) -> None:
    body = {"pickle_reserve_bytes": 65536, "per_rank_reserve_bytes": {"rng": 4096}}
    assert _agree(link, port, Kind.RESERVED, body) == Agreement(65536, {"rng": 4096})
    assert Proposal.from_frame(port.of(Kind.PROPOSE)[0]).per_rank_bytes == {"rng": 5}


def test_a_refused_layout_is_the_users_error_and_the_link_goes_on(link: Link, port: FakePort) -> None:
    body = {"code": "state", "message": "rank 1: tensor a: expected float32, got float16"}
    with pytest.raises(StateError, match="rank 1: tensor a"):
        _agree(link, port, Kind.REFUSED, body)
    assert link.job.problem is None
