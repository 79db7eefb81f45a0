"""States with different tensors on each rank become one tree, sent by the holders, or are refused."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.errors import ProtocolError, StateError
from holdfast.image.entries import SPLIT
from holdfast.image.regions import Region
from holdfast.wire.frames import decode
from holdfast.wire.layout_round import LayoutRound
from holdfast.wire.state_messages import Agreement, HeldRegions, Proposal
from holdfast.wire.state_union import Stage, StateUnion

Tree = dict[Any, Any]


def row(path: str, shape: list[int] | None = None, owner: int = -1, dtype: str = "float32") -> list[Any]:
    return [path, dtype, [4] if shape is None else shape, owner]


def staged(
    tree: Tree,
    *,
    sums: int = 0,
    scattered: str = "",
    regions: dict[str, Region] | None = None,
    groups: dict[str, Any] | None = None,
    **per_rank: int,
) -> Proposal:
    """Return the proposal of a rank with this tree: leaves are rows, or None for a plain value."""
    rows: list[list[Any]] = []

    def outline(node: Any) -> Any:
        if node is None:
            return None
        if isinstance(node, dict):
            return ["d", [[key, outline(one)] for key, one in node.items()], {}]
        if node and isinstance(node[0], list):
            return ["l", [outline(one) for one in node]]
        rows.append(node)
        return len(rows) - 1

    places = outline(tree)
    held = HeldRegions.of(
        (number, 4, (regions or {}).get(one[0], Region((0,) * len(one[2]), tuple(one[2]))))
        for number, one in enumerate(rows)
        if one[0] != scattered
    )
    found = [sums + number for number in range(len(rows))] if sums else []
    stage = Stage(places, groups or {})
    proposal = Proposal(str(rows), rows, 30_000, per_rank, array("I", found), held=held, stage=stage)
    assert Proposal.from_frame(decode(proposal.to_frame(1))) == proposal
    return proposal


def answered(*proposals: Proposal) -> Any:
    round_, answer = LayoutRound(len(proposals), 60), None
    for rank, proposal in enumerate(proposals):
        answer = round_.propose(rank, proposal, 0.0)
    return answer


def agreed(*proposals: Proposal) -> Agreement:
    answer = answered(*proposals)
    assert isinstance(answer, Agreement), answer
    assert Agreement.from_frame(decode(answer.to_frame(1))) == answer
    return answer


def holders(answer: Agreement) -> dict[str, tuple[tuple[int, ...], ...]]:
    assert answer.union is not None
    return {answer.union.table[at][0]: answer.patterns[number].holders for at, number in answer.split_rows}


def test_each_tensor_is_sent_by_the_ranks_that_have_it() -> None:
    first, second = (
        {"n": {"a": row("n/a"), "all": row("n/all")}},
        {"n": {"all": row("n/all"), "b": row("n/b", [])}},
    )
    answer = agreed(staged(first), staged(second), staged(second))
    assert answer.union is not None
    assert [one[0] for one in answer.union.table] == ["n/a", "n/all", "n/b"], (
        "rank 0's order, then what it lacks"
    )
    assert answer.union.staged == {0, 2}
    assert holders(answer) == {"n/a": ((0,),), "n/b": ((1, 2),)}
    assert answer.pickle_reserve_bytes > 2 * 60_000, "the pickle has the names of two stages"


def test_names_are_added_to_the_container_that_rank_0_has_however_others_order_it() -> None:
    first = {"n": {}, "o": {0: {"m": row("o/0/m")}}, "p": row("p")}
    second = {"p": row("p"), "o": {1: {"m": row("o/1/m")}, 0: {"m": row("o/0/m")}}, "n": {"x": row("n/x")}}
    union = agreed(staged(first), staged(second)).union
    assert union is not None
    assert [one[0] for one in union.table] == ["n/x", "o/0/m", "o/1/m", "p"]


def test_buffers_come_from_the_lowest_rank_and_shards_from_their_holders() -> None:
    w = row("n/w", [4, 2], SPLIT)
    buffer = row("n/b", owner=0)
    halves = [Region((0, 0), (2, 2)), Region((2, 0), (2, 2))]
    answer = agreed(
        staged({"n": {}}),
        *(staged({"n": {"w": w, "b": buffer}}, regions={"n/w": half}) for half in halves),
    )
    assert holders(answer) == {"n/w": ((1,), (2,)), "n/b": ((1,),)}


def test_parameters_of_all_ranks_are_in_the_groups() -> None:
    def groups(*names: str) -> dict[str, Any]:
        return {"o": [(list(names), "lr 1")]}

    answer = agreed(
        staged({"a": row("a")}, groups=groups("x", "y")), staged({"b": row("b")}, groups=groups("y", "z"))
    )
    assert answer.union is not None
    assert answer.union.groups == {"o": [["x", "y", "z"]]}


_A = {"n": {"a": row("n/a")}}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            lambda: staged({"n": {"a": row("n/a", [5]), "b": row("n/b")}}),
            ["rank 1: tensor n/a", "[4]", "[5]"],
        ),
        (lambda: staged({"n": {"a": row("n/a"), "b": row("n/b")}}, sums=7), ["not the same", "n/a"]),
        (
            lambda: staged({"n": {"b": row("n/b"), "note": None}}),
            ["rank 1", "does not have n/note", "plain value"],
        ),
        (lambda: staged({"n": {"b": [row("n/b/0")]}}), ["rank 1", "does not have n/b"]),
        (lambda: staged({"n": [row("n/0")]}), ["rank 1: n is a list", "on rank 0 a dict"]),
        (lambda: staged({"n": {"a": None}, "b": row("b")}), ["n/a is a plain value, and on rank 0 a tensor"]),
        (lambda: staged({"n/a": row("n/a")}), ["the ranks together", "two tensors are named n/a"]),
        (lambda: staged({"b": row("b")}, scattered="b"), ["rank 1: b does not lie in one piece"]),
        (lambda: staged({"b": row("b")}, rng=5), ["rank 1: expected PerRank values []"]),
        (lambda: staged({"b": row("b")}, groups={"o": []}), ["rank 1", "optimizers ['o']"]),
    ],
)
def test_states_that_cannot_be_one_tree_are_refused_by_name(
    other: Callable[[], Proposal], said: list[str]
) -> None:
    answer = answered(staged(_A, sums=3), other())
    assert isinstance(answer, StateError)
    assert all(words in str(answer) for words in said), answer


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([(["x"], "lr 2")], ["settings lr 2, and lr 1 on rank 0"]),
        ([(["z"], "lr 1"), (["x"], "lr 1")], ["2 groups"]),
    ],
)
def test_groups_that_do_not_fit_are_refused(groups: Any, said: list[str]) -> None:
    answer = answered(
        staged({"a": row("a")}, groups={"o": [(["x"], "lr 1")]}),
        staged({"b": row("b")}, groups={"o": groups}),
    )
    assert isinstance(answer, StateError)
    assert all(words in str(answer) for words in said), answer


@pytest.mark.parametrize(
    "outline",
    [1, "x", ["d", [], {}], ["d", [["a", 0], ["a", 0]], {}], ["d", [[None, 0]], {}], ["l", [0, 0]], True],
)
def test_an_outline_that_is_not_that_of_the_table_is_refused(outline: Any) -> None:
    table = [row("a")]
    with pytest.raises(ProtocolError):
        StateUnion.from_json({"table": table, "staged": [], "outline": outline, "groups": {}})
    answer = answered(Proposal("d", table, 1, {}, stage=Stage(outline, {})), staged({"b": row("b")}))
    assert isinstance(answer, ProtocolError)
