"""Proposals and agreements: what is written is read back, and nothing else is accepted."""

from __future__ import annotations

import zlib

import pytest

from holdfast.errors import ProtocolError
from holdfast.wire import frames as wire
from holdfast.wire import state_messages
from holdfast.wire.frames import Frame, Kind
from holdfast.wire.state_messages import Agreement, Proposal


def test_proposal_and_agreement_come_back() -> None:
    proposal = Proposal("d", [["model/a", "float32", [2, 3], -1]], 1000, {"rng": 5056})
    assert Proposal.from_frame(wire.decode(proposal.to_frame(3))) == proposal
    agreement = Agreement(65536, {"rng": 8192})
    assert Agreement.from_frame(wire.decode(agreement.to_frame(3))) == agreement


@pytest.mark.parametrize(
    "document",
    [
        {"table_digest": "d", "table": [["a", "f", [1]]], "pickle_bytes": 1, "per_rank_bytes": {}},
        {"table_digest": "d", "table": [], "pickle_bytes": -1, "per_rank_bytes": {}},
        {"table_digest": "d", "table": [], "pickle_bytes": 1, "per_rank_bytes": {"rng": 2**63}},
        {"table_digest": "d", "table": [], "pickle_bytes": 1, "per_rank_bytes": {"rng": "8"}},
        {"table": [], "pickle_bytes": 1, "per_rank_bytes": {}},
    ],
)
def test_hostile_proposals_are_refused(document: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        Proposal.from_frame(Frame(Kind.PROPOSE, body=zlib.compress(wire.to_json(document))))


def test_a_proposal_that_unpacks_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_messages, "_MAX_TABLE_BYTES", 1000)
    with pytest.raises(ProtocolError, match="above 1000"):
        Proposal.from_frame(Frame(Kind.PROPOSE, body=zlib.compress(b" " * 100_000)))


def test_a_cut_proposal_is_refused() -> None:
    body = wire.decode(Proposal("d", [], 1, {}).to_frame(1)).body
    for bad in (body[:-5], b"", b"not zlib"):
        with pytest.raises(ProtocolError):
            Proposal.from_frame(Frame(Kind.PROPOSE, body=bad))
