"""Samplers of several ranks are for the same data, or `restore()` names the rank and both values."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import PerRank, ResumableSampler
from holdfast.errors import StateError
from tests.support.restoring import Ranks, ThreadPeers
from trainer_side.ranks.peers import LonePeers, Peers, agree
from trainer_side.restore.same_data import describe_other_data


def compared(peers: Peers, state: dict[str, Any]) -> str:
    try:
        agree(peers, describe_other_data(state, peers))
    except StateError as error:
        return str(error)
    return ""


def sampler(rank: int, **changed: Any) -> ResumableSampler:
    return ResumableSampler(**{"length": 40, "seed": 1, "rank": rank, "ranks": 2, **changed})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"length": 41}, "data: expected length 40, as on rank 0, got 41"),
        ({"seed": 2}, "data: expected seed 1, as on rank 0, got 2"),
        ({"shuffle": False}, "data: expected order 'feistel-24', as on rank 0, got 'as it is'"),
        ({"ranks": 3}, "data: expected ranks 2, as on rank 0, got 3"),
        ({"drop_last": True}, "data: expected drop_last False, as on rank 0, got True"),
    ],
)
def test_a_sampler_for_other_data_is_refused_on_all_ranks(changed: dict[str, Any], said: str) -> None:
    def work(peers: ThreadPeers) -> str:
        return compared(peers, {"data": sampler(peers.rank, **(changed if peers.rank else {}))})

    found = Ranks(2).run(work)
    assert found[0].startswith(f"rank 1: {said}")
    assert found[1].startswith(said)


def test_a_sampler_of_each_rank_alone_and_one_for_the_same_data_are_taken() -> None:
    def work(peers: ThreadPeers) -> str:
        own = PerRank(sampler(0, length=10 + peers.rank, ranks=1), same_ranks=True)
        return compared(peers, {"data": sampler(peers.rank), "own": own})

    assert Ranks(2).run(work) == ["", ""]
    assert compared(LonePeers(), {"data": sampler(0)}) == ""
