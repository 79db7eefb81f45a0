"""The proof of replicas: every difference in replicated state is found; state that differs by nature is named."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ProtocolError, StateError
from holdfast.image.replicas import format_ranks
from holdfast.wire.frames import decode
from holdfast.wire.layout_round import LayoutRound
from holdfast.wire.replica_proof import ReplicaProof, compare_replicas, decode_sums, encode_sums
from holdfast.wire.state_messages import Agreement, Proposal

ROWS: list[list[Any]] = [
    ["model/a.weight", "float32", [8, 8], -1],
    ["model/a.bias", "float32", [8], -1],
    ["optimizer/state/0/exp_avg", "float32", [8, 8], -1],
    ["model/bn.running_mean", "float32", [8], 0],
    ["generator", "uint8", [16], 0],
    ["rng/0", "bytes", [], 0],
]
SAME = [1, 2, 3, 4, 5, 6]


def changed(*places: int) -> list[int]:
    return [crc + 100 if place in places else crc for place, crc in enumerate(SAME)]


def rows(*named: tuple[str, list[int]], owner: int = -1) -> list[list[Any]]:
    return [[path, "float32", shape, owner] for path, shape in named]


def test_equal_ranks_prove_it() -> None:
    assert compare_replicas(ROWS, {0: SAME, 1: SAME, 2: SAME}) == ReplicaProof("", ())


@given(st.integers(2, 6), st.data())
def test_a_single_differing_replica_on_one_rank_is_refused(ranks: int, data: st.DataObject) -> None:
    odd, place = data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(0, 2))
    found = compare_replicas(ROWS, {rank: changed(place) if rank == odd else SAME for rank in range(ranks)})
    assert ROWS[place][0] in found.refusal
    assert f"rank {odd}" in found.refusal
    assert "1 of 6 tensors" in found.refusal


def test_values_of_rank_0_by_nature_are_named_and_not_refused() -> None:
    found = compare_replicas(ROWS, {0: SAME, 1: changed(3, 4), 2: changed(4)})
    assert found == ReplicaProof("", ("model/bn.running_mean", "generator"))


def test_per_rank_values_are_not_compared() -> None:
    assert compare_replicas(ROWS, {0: SAME, 1: changed(5)}) == ReplicaProof("", ())


def test_much_of_the_state_that_is_rank_0s_is_a_part_of_a_model() -> None:
    table = [*rows(("model/w", [10, 9])), *rows(("ema/w", [12]), ("ema/tiny", [9]), owner=0)]
    tiny = compare_replicas(table, {0: [1, 2, 3], 1: [1, 2, 4]})
    assert tiny == ReplicaProof("", ("ema/tiny",))
    part = compare_replicas(table, {0: [1, 2, 3], 1: [1, 5, 3]})
    assert "ema/w" in part.refusal
    assert part.refusal.index("Split(tensor, shape, start)") < part.refusal.index(
        "PerRank(..., same_ranks=True)"
    )


@pytest.mark.parametrize(
    ("table", "split", "words"),
    [
        (ROWS, {2}, "partitioned among the ranks (ZeRO, DeepSpeed, FSDP1)"),
        (rows(("model/_flat_param", [99]), ("model/b", [4])), {0}, "flat partitions"),
        (rows(("model/experts.0.w", [4, 4]), ("model/w", [4, 4])), {0}, "experts of its own"),
        (rows(("model/moe.w1", [4, 4]), ("model/w", [4, 4])), {0}, "experts of its own"),
        (rows(("model/w", [4, 4]), ("model/norm", [4])), {0}, "It looks like tensor parallelism"),
        (rows(("model/w", [4, 4]), ("model/b", [4])), {0, 1}, "pipeline stages"),
        (rows(("model/w", [4, 4]), ("model/v", [4, 4])), {0}, "expert parallelism or tensor parallelism"),
    ],
)
def test_the_likely_parallelism_is_named(table: list[list[Any]], split: set[int], words: str) -> None:
    sums = [place for place, _ in enumerate(table)]
    other = [crc + 1000 if place in split else crc for place, crc in enumerate(sums)]
    assert words in compare_replicas(table, {0: sums, 1: other}).refusal


MODEL = rows(("model/0.weight", [8, 8]), ("model/0.bias", [8]), ("model/2.weight", [4, 8]))
MOMENTS = rows(("optimizer/state/0/exp_avg", [8, 8]), ("optimizer/state/1/exp_avg", [8]))
SHAPES = ([8, 8], [8], [4, 8])


def refused(table: list[list[Any]], differs: set[int]) -> str:
    sums = [place for place, _ in enumerate(table)]
    other = [crc + 1000 if place in differs else crc for place, crc in enumerate(sums)]
    return compare_replicas(table, {0: sums, 1: other}).refusal


@pytest.mark.parametrize(
    "names",
    [
        ("ema/module.0.weight", "ema/module.0.bias", "ema/module.2.weight"),
        ("ema/0.weight", "ema/0.bias", "ema/2.weight"),
        ("ema/ema_model.0.weight", "ema/ema_model.0.bias", "ema/ema_model.2.weight"),
        ("ema/state/0.weight", "ema/state/0.bias", "ema/state/2.weight"),
        ("all/ema/0.weight", "all/ema/0.bias", "all/ema/2.weight"),
        ("ema/shadow_params/0", "ema/shadow_params/1", "ema/shadow_params/2"),
    ],
)
@pytest.mark.parametrize("differs", [{0, 1, 2}, {0, 2}])
@pytest.mark.parametrize("owner", [-1, 0])
def test_a_copy_that_was_made_too_early_is_named_before_anything_is_guessed(
    names: tuple[str, ...], differs: set[int], owner: int
) -> None:
    copied = rows(*zip(names, SHAPES, strict=True), owner=owner)
    for model in (MODEL, [[row[0].replace("/", "/module."), *row[1:]] for row in MODEL]):
        said = refused([*copied, *model, *MOMENTS], differs)
        assert "a copy of a model that each rank made" in said
        assert f"{model[0][0]} is the same on every rank, and {names[0]}, its copy" in said
        assert "expert" not in said
        assert "Split" not in said


@pytest.mark.parametrize(
    ("named", "differs", "words"),
    [
        # Experts, of which the shared one has the same names.
        ([("model/experts.0.w", [4, 4]), ("model/shared.0.w", [4, 4])], {0}, "experts of its own"),
        ([("model/layers.3.moe.w", [4, 4]), ("model/layers.0.mlp.w", [4, 4])], {0}, "experts of its own"),
        # A layer beside one that is the same on every rank, and moments.
        ([("layers/3/w", [4, 4]), ("layers/0/w", [4, 4])], {0}, "expert parallelism or tensor parallelism"),
        ([("model/l.3.w", [4, 4]), ("model/l.0.w", [4, 4])], {0}, "expert parallelism or tensor parallelism"),
        ([("model/l.q.w", [4, 4]), ("model/l.k.w", [4, 4])], {0}, "expert parallelism or tensor parallelism"),
        ([("o/state/a.w/exp_avg", [4, 4]), ("o/state/b.w/exp_avg", [4, 4])], {0}, "partitioned among"),
        # A copy, and a part of the model besides.
        (
            [("ema/w", [4, 4]), ("model/w", [4, 4]), ("model/v", [4, 4])],
            {0, 2},
            "model/w is the same on every rank, and ema/w is not: perhaps",
        ),
        (
            [("parts/0", [4, 4]), ("parts/1", [4]), ("model/w", [4, 4])],
            {0, 1},
            "model/w is the same on every",
        ),
    ],
)
def test_a_tensor_that_is_no_copy_is_not_called_one(
    named: list[tuple[str, list[int]]], differs: set[int], words: str
) -> None:
    said = refused(rows(*named), differs)
    assert words in said
    assert "a copy of a model" not in said


def test_ranks_that_are_equal_among_each_other_stand_together() -> None:
    found = compare_replicas(ROWS, {0: SAME, 1: changed(0), 2: SAME, 3: changed(0)})
    assert "ranks 0, 2 and ranks 1, 3 differ in model/a.weight" in found.refusal


def test_a_thousand_ranks_make_no_thousand_words() -> None:
    found = compare_replicas(ROWS, {rank: [rank, *SAME[1:]] for rank in range(1000)})
    assert "rank 0 and rank 1 and rank 2 and rank 3 and 996 more groups differ" in found.refusal
    assert format_ranks(range(1000)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 992 more"


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_sums_come_back(sums: list[int]) -> None:
    assert decode_sums(encode_sums(sums), len(sums)) == array("I", sums)


@pytest.mark.parametrize("data", [b"1234", b"!", encode_sums([1, 2, 3])])
def test_sums_of_another_number_of_rows_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="checksums"):
        decode_sums(data, 2)


# -- in the round ---------------------------------------------------------------------------------------------


def proposal(sums: list[int]) -> Proposal:
    sent = Proposal("digest", ROWS, 1000, {}, sums=tuple(sums))
    return Proposal.from_frame(decode(sent.to_frame(1)))


def answer(*proposals: Proposal) -> object:
    round_ = LayoutRound(len(proposals), 60)
    *before, last = (round_.propose(rank, one, 0.0) for rank, one in enumerate(proposals))
    assert before == [None] * len(before)
    return last


def test_the_round_refuses_replicas_that_are_none() -> None:
    said = answer(proposal(SAME), proposal(changed(1)))
    assert isinstance(said, StateError)
    assert "model/a.bias" in str(said)


def test_the_round_names_what_is_rank_0s() -> None:
    said = answer(proposal(SAME), proposal(changed(4)))
    assert isinstance(said, Agreement)
    assert said.rank0_only == ("generator",)
    assert Agreement.from_frame(decode(said.to_frame(1))) == said


def test_a_rank_that_trains_alone_proves_nothing() -> None:
    assert isinstance(answer(proposal([])), Agreement)


def test_a_refusal_of_one_rank_is_everybodys_when_all_have_come() -> None:
    refused = Proposal.from_frame(decode(Proposal.refused(StateError("model/w is odd")).to_frame(1)))
    round_ = LayoutRound(3, 60)
    assert round_.propose(1, refused, 0.0) is None
    assert round_.propose(0, proposal(SAME), 0.0) is None
    said = round_.propose(2, proposal(SAME), 0.0)
    assert isinstance(said, StateError)
    assert str(said) == "rank 1: model/w is odd"
    assert str(answer(refused, refused)) == "model/w is odd", "of all ranks"
    assert isinstance(answer(proposal(SAME), proposal(SAME)), Agreement)
