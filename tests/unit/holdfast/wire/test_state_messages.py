"""Proposals and agreements: written ones are read back, and all others are refused."""

from __future__ import annotations

import struct
import zlib
from array import array

import pytest

from holdfast.errors import ProtocolError
from holdfast.image.entries import SPLIT
from holdfast.image.regions import Region
from holdfast.parse_cost import inflate_json
from holdfast.wire import frames as wire
from holdfast.wire import state_messages
from holdfast.wire.frames import Frame, Kind
from holdfast.wire.state_messages import Agreement, HeldRegions, Proposal, ProposalReader


def test_proposal_and_agreement_come_back() -> None:
    proposal = Proposal("d", [["model/a", "float32", [2, 3], -1]], 1000, {"rng": 5056})
    assert Proposal.from_frame(wire.decode(proposal.to_frame(3))) == proposal
    agreement = Agreement(65536, {"rng": 8192})
    assert Agreement.from_frame(wire.decode(agreement.to_frame(3))) == agreement


def _body(shared: bytes, own: bytes, sums: bytes = b"") -> Frame:
    return Frame(Kind.PROPOSE, body=struct.pack("<II", len(shared), len(own)) + shared + own + sums)


def _packed(document: dict[str, object]) -> bytes:
    return zlib.compress(wire.to_json(document))


_TABLE: dict[str, object] = {"table_digest": "d", "table": [["a", "f", [1], -1]]}
_OWN: dict[str, object] = {"pickle_bytes": 1, "per_rank_bytes": {}}


@pytest.mark.parametrize(
    ("shared", "own"),
    [
        ({"table_digest": "d", "table": [["a", "f", [1]]]}, _OWN),
        ({"table": []}, _OWN),
        ({**_TABLE, "held_rows": [[0, 0]]}, _OWN),
        ({"table_digest": "d", "table": [["a", "f", [1], -2]], "held_rows": [[0, 0]]}, _OWN),
        (_TABLE, {**_OWN, "pickle_bytes": -1}),
        (_TABLE, {**_OWN, "per_rank_bytes": {"rng": 2**63}}),
        (_TABLE, {**_OWN, "per_rank_bytes": {"rng": "8"}}),
        (_TABLE, {**_OWN, "refusal": "no"}),
        (_TABLE, {**_OWN, "regions": [3]}),
    ],
)
def test_hostile_proposals_are_refused(shared: dict[str, object], own: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        Proposal.from_frame(_body(_packed(shared), _packed(own)))


def test_a_proposal_that_unpacks_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_messages, "_MAX_TABLE_BYTES", 1000)
    endless = zlib.compress(b" " * 100_000)
    for frame in (_body(endless, _packed(_OWN)), _body(_packed(_TABLE), endless)):
        with pytest.raises(ProtocolError, match="above 1000"):
            Proposal.from_frame(frame)


def test_parts_that_are_longer_than_the_message_are_refused() -> None:
    for lengths in ((0, 0), (1 << 31, 0), (4, 1 << 31)):
        with pytest.raises(ProtocolError, match="cannot be unpacked"):
            Proposal.from_frame(Frame(Kind.PROPOSE, body=struct.pack("<II", *lengths) + b"zzzz"))


def test_equal_proposals_of_many_ranks_are_unpacked_and_kept_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unpacked = 0

    def counted(data: memoryview, bytes_max: int) -> bytes:
        nonlocal unpacked
        unpacked += len(found := inflate_json(data, bytes_max))
        return found

    monkeypatch.setattr(state_messages, "inflate_json", counted)
    rows: list[list[object]] = [[f"layer.{number}", "float32", [64, 4], SPLIT] for number in range(1000)]
    table_bytes = len(wire.to_json({"table": rows}))
    reader = ProposalReader(2)
    read = []
    for rank in range(64):
        held = HeldRegions(
            ((4, Region((rank, 0), (1, 4))),), tuple((number, 0) for number in range(len(rows)))
        )
        sent = Proposal("d", rows, 1000, {"rng": rank}, array("I", [rank] * len(rows)), held=held)
        read.append(reader.read(wire.decode(sent.to_frame(1))))
        assert read[-1] == sent
    assert len({id(one.table) for one in read}) == len({id(one.held.rows) for one in read}) == 1
    assert unpacked < 2 * table_bytes
    assert read[7].per_rank_bytes == {"rng": 7}
    reader.reset()
    again = reader.read(wire.decode(read[0].to_frame(1)))
    assert again == read[0]
    assert again.table is not read[0].table


def test_a_cut_proposal_is_refused() -> None:
    body = wire.decode(Proposal("d", [], 1, {}).to_frame(1)).body
    for bad in (body[:-5], b"", b"not zlib"):
        with pytest.raises(ProtocolError):
            Proposal.from_frame(Frame(Kind.PROPOSE, body=bad))
