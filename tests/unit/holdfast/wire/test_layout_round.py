"""Agreement: the differing rank and tensor are named; reserves are the same for all."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

import pytest

from holdfast.errors import ConfigError, PeerLost, ProtocolError, StateError
from holdfast.image.entries import SPLIT
from holdfast.image.regions import Region
from holdfast.wire.frames import decode
from holdfast.wire.layout_round import LayoutRound, OneSidedRound, pickle_reserve_bytes
from holdfast.wire.state_messages import Agreement, HeldRegions, Proposal, held_rows

ROWS: list[list[Any]] = [
    ["model/a", "float32", [2, 3], -1],
    ["model/b", "float32", [4], -1],
    ["rng", "uint8", [16], 0],
]


def proposal(rows: list[list[Any]] = ROWS, *, pickle_bytes: int = 1000, **per_rank_bytes: int) -> Proposal:
    return Proposal(str(hash(str(rows))), rows, pickle_bytes, per_rank_bytes)


def agree(*proposals: Proposal) -> object:
    """Let all ranks propose, last rank first; return the answer."""
    round_ = LayoutRound(len(proposals), 60)
    answer: object = None
    for rank in reversed(range(len(proposals))):
        assert answer is None
        answer = round_.propose(rank, proposals[rank], 0.0)
    return answer


def test_equal_tables_get_the_same_reserves() -> None:
    answer = agree(
        proposal(pickle_bytes=40_000, rng=5000),
        proposal(pickle_bytes=1, rng=9000),
        proposal(pickle_bytes=1, rng=10),
    )
    assert answer == Agreement(pickle_reserve_bytes=131_072, per_rank_reserve_bytes={"rng": 12_288})


def test_a_lone_rank_agrees_with_itself() -> None:
    assert isinstance(agree(proposal()), Agreement)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [ROWS[0], ["model/b", "float16", [4], -1], ROWS[2]],
            ["rank 1: tensor model/b: expected (float32 [4]", "got (float16 [4]"],
        ),
        ([ROWS[0], ["model/b", "float32", [5], -1], ROWS[2]], ["model/b", "[4]", "[5]"]),
        ([ROWS[0], ROWS[1], ["rng", "uint8", [16], -1]], ["rng", "of rank 0", "replicated"]),
        ([ROWS[1], ROWS[0], ROWS[2]], ["expected tensor model/a", "got tensor model/b"]),
    ],
)
def test_the_difference_is_named(rows: list[list[Any]], said: list[str]) -> None:
    answer = agree(proposal(), proposal(rows))
    assert isinstance(answer, StateError)
    for words in said:
        assert words in str(answer)


def test_the_first_rank_that_differs_is_named() -> None:
    answer = agree(proposal(), proposal(), proposal(ROWS[::-1]))
    assert "rank 2" in str(answer)


@pytest.mark.parametrize("rows", [ROWS[:2], [*ROWS, ["extra", "int64", [], -1]], [*ROWS, ROWS[0]]])
def test_ranks_with_other_tensors_are_asked_for_their_places(rows: list[list[Any]]) -> None:
    answer = agree(proposal(), proposal(rows))
    assert answer == Agreement(0, {}, asks_stages=True)
    assert Agreement.from_frame(decode(answer.to_frame(1))) == answer


def test_other_per_rank_values_are_refused() -> None:
    answer = agree(proposal(rng=1), proposal(seed=1))
    assert isinstance(answer, StateError)
    assert "['rng']" in str(answer)
    assert "['seed']" in str(answer)


def test_a_missing_rank_is_waited_for_only_so_long() -> None:
    round_ = LayoutRound(3, 60)
    round_.propose(1, proposal(), 100.0)
    assert round_.expire(160.0) is None
    answer = round_.expire(160.1)
    assert isinstance(answer, PeerLost)
    assert "ranks 0, 2" in str(answer)
    assert "not inside `if rank == 0:`" in str(answer)
    assert round_.expire(1000.0) is None, "said once"


def test_a_rank_that_is_late_is_named_once_before_the_round_ends() -> None:
    round_ = LayoutRound(2, 60)
    assert round_.late_warning(50.0) == "", "nobody waits"
    for begun in (100.0, 200.0):
        round_.propose(0, proposal(), begun)
        assert round_.late_warning(begun + 10.0) == ""
        said = round_.late_warning(begun + 10.1)
        assert "has waited 10 s for the layout of rank 1" in said
        assert "not inside `if rank == 0:`" in said
        assert round_.late_warning(begun + 20.0) == "", "said once"
        round_.propose(1, proposal(), begun + 21.0)
        assert round_.late_warning(begun + 50.0) == ""


def test_a_lost_rank_ends_the_round() -> None:
    round_ = LayoutRound(2, 60)
    assert round_.record_lost(1, "rank 1 is dead") is None, "nobody waits"
    for answer in (round_.propose(0, proposal(), 0.0), round_.propose(0, proposal(), 9.0)):
        assert isinstance(answer, PeerLost)
        assert str(answer) == "rank 0 began a save, and the ranks cannot agree on a layout: rank 1 is dead"


def test_a_rank_that_ended_without_a_save_ends_the_open_round_with_the_advice() -> None:
    round_ = LayoutRound(3, 60)
    round_.propose(0, proposal(), 0.0)
    answer = round_.record_lost(2, "rank 2 has left", has_exited=True)
    assert isinstance(answer, PeerLost)
    assert "rank 2 has left. Every rank must call step() or save()" in str(answer)
    assert round_.record_lost(1, "rank 1 has left") is None, "all have heard"


def test_rounds_follow_each_other() -> None:
    round_ = LayoutRound(2, 60)
    for pickle_bytes in (10, 100_000):
        assert round_.propose(0, proposal(pickle_bytes=pickle_bytes), 0.0) is None
        answer = round_.propose(1, proposal(), 0.0)
        assert isinstance(answer, Agreement)
        assert answer.pickle_reserve_bytes > 2 * pickle_bytes


CHANGED = dataclasses.replace(
    proposal(), step=20, change="tensor model/a: split, [0:2] here before, [0:3] here now"
)


@pytest.mark.parametrize("proposes_first", [True, False])
def test_a_rank_whose_state_alone_has_changed_is_named_at_once(proposes_first: bool) -> None:
    round_ = LayoutRound(3, 60)
    ended: object
    if proposes_first:
        assert round_.propose(1, CHANGED, 0.0) is None
        ended = round_.record_fits(2, 20)
    else:
        assert round_.record_fits(2, 20) is None
        ended = round_.propose(1, CHANGED, 0.0)
    assert isinstance(ended, OneSidedRound)
    assert (ended.ranks, ended.step) == ((1,), 20)
    assert isinstance(ended.error, StateError)
    assert f"step 20: the state of rank 1 has changed, and that of rank 2 has not: {CHANGED.change}." in str(
        ended.error
    )
    assert round_.expire(1000.0) is None, "the round is over"
    for rank in range(3):
        answer = round_.propose(rank, dataclasses.replace(CHANGED, step=30), 0.0)
    assert isinstance(answer, Agreement)


def test_other_steps_and_steps_that_are_saved_twice_end_no_round() -> None:
    round_ = LayoutRound(2, 60)
    assert round_.record_fits(0, 20) is None
    assert round_.record_fits(1, 20) is None
    assert round_.propose(1, CHANGED, 0.0) is None, "its first save of that step fitted"
    assert isinstance(round_.propose(0, CHANGED, 0.0), Agreement)
    for step in (10, 30):
        assert round_.record_fits(0, step) is None
        assert round_.propose(1, dataclasses.replace(CHANGED, step=20), 0.0) is None
        assert isinstance(round_.propose(0, proposal(), 0.0), Agreement)
    assert round_.propose(1, proposal(), 0.0) is None, "of no step"
    assert round_.record_fits(0, 40) is None


def test_a_rank_that_alone_cannot_save_is_not_waited_for_either() -> None:
    round_ = LayoutRound(2, 60)
    round_.record_fits(0, 20)
    ended = round_.propose(1, Proposal.refused(ConfigError("no such thing"), 20), 0.0)
    assert isinstance(ended, OneSidedRound)
    assert isinstance(ended.error, ConfigError)
    assert str(ended.error) == "step 20: rank 1: no such thing"


def test_step_and_change_travel_with_a_proposal() -> None:
    read = Proposal.from_frame(decode(CHANGED.to_frame(3)))
    assert (read.step, read.change) == (20, CHANGED.change)
    read = Proposal.from_frame(decode(proposal().to_frame(3)))
    assert (read.step, read.change) == (-1, "")


@pytest.mark.parametrize(
    ("needed", "given"), [(0, 65536), (1, 65536), (32767, 65536), (32768, 131072), (70_000, 196608)]
)
def test_pickle_reserve(needed: int, given: int) -> None:
    assert pickle_reserve_bytes(needed) == given


SPLIT_ROWS: list[list[Any]] = [
    ["w", "float32", [4, 2], SPLIT],
    ["b", "int64", [], 0],
    ["m", "float32", [4, 2], SPLIT],
]


def holding(*regions: Region, sums: tuple[int, ...] = ()) -> Proposal:
    """Return the proposal of a rank that holds these regions of `w` and `m`."""
    held = HeldRegions.of((row, 4, region) for row, region in zip((0, 2), regions, strict=True))
    return Proposal("digest", SPLIT_ROWS, 100, {}, array("I", sums), held=held)


def rows(first: int, end: int) -> Region:
    return Region((first, 0), (end - first, 2))


def test_regions_of_all_ranks_become_patterns_and_travel_whole() -> None:
    proposals = [
        holding(rows(0, 3), rows(0, 3)),
        holding(rows(3, 4), rows(3, 4)),
        holding(rows(0, 0), rows(0, 0)),
    ]
    again = [Proposal.from_frame(decode(one.to_frame(1))) for one in proposals]
    assert again == proposals
    answer = agree(*again)
    assert isinstance(answer, Agreement)
    assert answer.split_rows == ((0, 0), (2, 0))
    (pattern,) = answer.patterns
    assert (pattern.shape, pattern.item_bytes) == ((4, 2), 4)
    assert (pattern.regions, pattern.holders) == ((rows(0, 3), rows(3, 4)), ((0,), (1,)))
    assert Agreement.from_frame(decode(answer.to_frame(1))) == answer


@pytest.mark.parametrize(
    ("proposals", "said"),
    [
        ([holding(rows(0, 2), rows(0, 3)), holding(rows(2, 4), rows(2, 4))], ["tensor m", "overlap"]),
        ([holding(rows(0, 2), rows(0, 2)), holding(rows(2, 3), rows(2, 4))], ["tensor w", "6 of the 8"]),
        (
            [holding(rows(0, 4), rows(0, 5)), holding(rows(0, 4), rows(0, 5))],
            ["tensor m", "[0:5, 0:2] is not in"],
        ),
        (
            [
                holding(rows(0, 4), rows(0, 4), sums=(7, 0, 8)),
                holding(rows(0, 4), rows(0, 4), sums=(7, 0, 9)),
            ],
            ["tensor m", "rank 1 and rank 0 hold the same region, [0:4, 0:2], with other bytes"],
        ),
    ],
)
def test_regions_that_make_up_no_whole_are_refused_by_name(
    proposals: list[Proposal], said: list[str]
) -> None:
    answer = agree(*proposals)
    assert isinstance(answer, StateError)
    assert all(word in str(answer) for word in said), answer


def test_shards_that_differ_are_no_replicas() -> None:
    answer = agree(
        holding(rows(0, 2), rows(0, 2), sums=(1, 5, 2)), holding(rows(2, 4), rows(2, 4), sums=(3, 5, 4))
    )
    assert isinstance(answer, Agreement)


@pytest.mark.parametrize(
    ("regions", "rows"),
    [
        ([], []),
        ([[4, [0, 0], [4, 2]]], [[0, 0]]),
        ([[4, [0, 0], [4, 2]]], [[0, 0], [1, 0]]),
        ([[4, [0, 0], [4, 2]]], [[0, 0], [2, 1]]),
        ([[4, [0, 0], [4, -2]]], [[0, 0], [2, 0]]),
        ([[4, [0.0, 0], [4, 2]]], [[0, 0], [2, 0]]),
        ("none", [[0, 0], [2, 0]]),
        (None, [[0, 0], [2, 0]]),
        ([[4, [0, 0], [4, 2]]], None),
    ],
)
def test_regions_that_do_not_fit_the_table_are_refused(regions: Any, rows: Any) -> None:
    with pytest.raises(ProtocolError, match=r"PROPOSE: .*regions"):
        HeldRegions.from_json(regions, held_rows(rows, SPLIT_ROWS), 2 if rows == [[0, 0], [2, 1]] else 1)


def test_another_table_under_the_digest_of_rank_0_is_refused() -> None:
    first = Proposal("same", [["a", "float32", [2], -1]], 100, {}, (1,))
    for table in ([["b", "float32", [2], -1]], []):
        answer = agree(first, Proposal("same", table, 100, {}, (1,) * len(table)))
        assert isinstance(answer, ProtocolError)
        assert "rank 1" in str(answer)
