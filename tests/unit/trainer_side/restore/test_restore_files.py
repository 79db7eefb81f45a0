"""Restore of the files that our own skeletons make: padded pickles, blobs of every rank, slices of several ranks."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from holdfast.crc import crc32
from holdfast.image.layout import Layout
from holdfast.image.manifest import EntryRecord, TensorRecord, manifest_name
from tests.support.checkpoints import manifest_of
from tests.support.restoring import CountingStore, Ranks
from tests.unit.trainer_side.assemble import assembled, make_plan, save, sent, taken
from tests.unit.trainer_side.restore.test_restore import Holder, Run, assert_same
from tests.unit.trainer_side.state.test_skeleton import _same, _sharing, _states
from trainer_side.restore.restore import restore
from trainer_side.state.per_rank import PerRank
from trainer_side.state.tree import tensor_paths

CHUNK_BYTES = 4096


def describe(root: Path, layout: Layout, *, ranks: int) -> None:
    """Write the manifest of step 1 beside its file."""
    image = (root / "step-000000001.pt").read_bytes()
    entries = tuple(
        EntryRecord(name=e.name, offset=e.offset, nbytes=e.nbytes, crc32=crc32(image[e.offset : e.end]))
        for e in layout.entries
    )
    tensors = tuple(
        TensorRecord(path=t.path, dtype=t.dtype, shape=t.shape, entry=t.entry) for t in layout.tensors
    )
    manifest = manifest_of(image, step=1, chunk_bytes=CHUNK_BYTES, ranks=ranks)
    manifest = manifest.model_copy(update={"entries": entries, "tensors": tensors})
    (root / manifest_name(manifest.file)).write_bytes(manifest.to_bytes())


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_file_of_two_ranks_comes_back_on_any_number(tmp_path: Path, ranks: int) -> None:
    saved = Run(1, steps=2)
    frames = []
    for rank in range(2):
        state = {**saved.state, "own": PerRank({"rank": rank})}
        skeleton = make_plan(state, rank=rank, ranks=2, chunk_bytes=CHUNK_BYTES, reserve=1 << 16)
        frames.append(sent(skeleton, taken(state, skeleton)))
    (tmp_path / "step-000000001.pt").write_bytes(assembled(skeleton.layout, frames))
    describe(tmp_path, skeleton.layout, ranks=2)
    runs = [Run(10 + rank, steps=rank) for rank in range(ranks)]
    own = [PerRank({"rank": -1}) for _ in range(ranks)]
    Ranks(ranks).run(
        lambda peers: restore(
            {**runs[peers.rank].state, "own": own[peers.rank]}, CountingStore(tmp_path), peers, events=None
        )
    )
    assert [value.value["rank"] for value in own] == [0, 1, -1][:ranks]
    expected_tree, expected_loss = copy.deepcopy(saved.tree()), saved.loss()
    for run in runs:
        assert_same(run.tree(), expected_tree)
        assert run.loss() == expected_loss


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(drawn=_states())
def test_any_state_comes_back_with_its_ties_whatever_lies_in_memory(drawn: dict[str, Any]) -> None:
    state = {name.replace("/", "_"): value for name, value in drawn.items()}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        path = root / "step-000000001.pt"
        layout = save({name: Holder(value) for name, value in state.items()}, path, chunk_bytes=CHUNK_BYTES)
        describe(root, layout, ranks=1)
        expected = torch.load(path, weights_only=True)
        for live in (dict.fromkeys(state), expected, {name: copy.deepcopy(expected[name]) for name in state}):
            for ranks in (1, 2):
                targets = [_holders(live) for _ in range(ranks)]
                Ranks(ranks).run(
                    lambda peers, targets=targets: restore(  # type: ignore[misc]
                        targets[peers.rank], CountingStore(root), peers, events=None
                    )
                )
                for target in targets:
                    found = {name: holder.value for name, holder in target.items()}
                    _same(found, expected)
                    assert _sharing(found) == _sharing(expected)


def _holders(live: dict[str, Any]) -> dict[str, Holder]:
    """Objects that hold tensors of the same kinds and ties, all zero."""
    zeros = copy.deepcopy(live)
    for _, tensor in tensor_paths(zeros):
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).zero_()
    return {name: Holder(value) for name, value in zeros.items()}
