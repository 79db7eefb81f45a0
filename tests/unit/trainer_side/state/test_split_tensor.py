"""Objects that describe their part of a tensor for torch.distributed.checkpoint: accepted, or refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from holdfast.errors import StateError
from holdfast.image.regions import Region
from tests.support.restoring import CountingStore, publish
from trainer_side.ranks.peers import LonePeers
from trainer_side.restore.restore import restore
from trainer_side.state.split_tensor import held_part, is_split
from trainer_side.state.stand_ins import SplitStandIns

WHOLE = torch.arange(20.0).reshape(5, 4)


class Rows:
    """Some rows of a tensor of 5 x 4, in parts of one row or more."""

    def __init__(self, start: int, *parts: torch.Tensor) -> None:
        self.shape = (5, 4)
        self.parts = list(parts)
        self.starts = [start + sum(map(len, parts[:number])) for number in range(len(parts))]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size((start, 0)), part.size())
            for start, part in zip(self.starts, self.parts, strict=True)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.parts[self.starts.index(index.offset[0])]


class OfLess(Rows):
    """Says more than it has."""

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return super().__get_tensor_shard__(index)[1:]


class Copying(Rows):
    """Has no memory of its own to restore into."""

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return super().__get_tensor_shard__(index).clone()


class Mute(Rows):
    """As torch's own protocol class: says nothing yet."""

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        raise NotImplementedError("no shard")


def test_an_objects_part_is_the_one_that_it_says() -> None:
    rows = Rows(2, WHOLE[2:4].clone())
    assert is_split(rows)
    found = held_part(rows)
    assert found is not None
    assert (found.shape, found.region) == ((5, 4), Region((2, 0), (2, 4)))
    assert found.local.data_ptr() == rows.parts[0].data_ptr()


@pytest.mark.parametrize("top", [True, False])
def test_a_split_object_is_restored_in_place(tmp_path: Path, top: bool) -> None:
    publish(tmp_path, 5, {"w": WHOLE} if top else {"more": {"w": WHOLE}})
    rows = Rows(1, torch.zeros(3, 4))
    address = rows.parts[0].data_ptr()
    state: dict[str, Any] = {"w": rows} if top else {"more": {"w": rows}}
    restore(state, CountingStore(tmp_path), LonePeers(), events=None)
    assert (state["w"] if top else state["more"]["w"]) is rows
    assert rows.parts[0].data_ptr() == address
    assert torch.equal(rows.parts[0], WHOLE[1:4])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (Rows(0), "Rows of 0 parts on this rank, expected 1"),
        (Rows(0, WHOLE[:1], WHOLE[1:2]), "Rows of 2 parts on this rank, expected 1"),
        (OfLess(0, WHOLE[:3]), r"OfLess that says it has [3, 4] of [5, 4] on this rank, and has [2, 4]"),
        (Copying(0, WHOLE[:3]), "Copying that gives a copy of its part each time"),
        (Mute(0, WHOLE[:3]), "cannot be asked for its part and its shape: NotImplementedError('no shard')"),
        (Rows(4, WHOLE[:3]), "a part of shape [3, 4] that begins at [4, 0] is not within"),
        (Rows(0, WHOLE.t().contiguous().t()[:3]), "does not lie in one piece"),
    ],
)
def test_a_split_object_that_cannot_be_saved_is_refused_with_its_path(rows: Rows, said: str) -> None:
    with pytest.raises(StateError, match=rf"^experts/up is .*{re.escape(said)}"):
        SplitStandIns().expand({"experts": {"up": rows}})


def test_several_shards_of_torchs_own_wrapper_are_refused() -> None:
    wrapper = LocalShardsWrapper([WHOLE[:2].clone(), WHOLE[2:].clone()], [(0, 0), (2, 0)])
    with pytest.raises(StateError, match=r"^w is .*LocalShardsWrapper of 2 parts on this rank"):
        SplitStandIns().expand({"w": wrapper})


def test_a_plan_does_not_fit_a_part_that_lies_elsewhere() -> None:
    shards = SplitStandIns()
    shards.expand({"w": Rows(0, WHOLE[:2].clone())})
    assert shards.expand_again({"w": Rows(0, WHOLE[2:4].clone())}) is not None
    assert shards.expand_again({"w": Rows(1, WHOLE[:2].clone())}) is None
    assert shards.expand_again({"w": Mute(0, WHOLE[:2].clone())}) is None
