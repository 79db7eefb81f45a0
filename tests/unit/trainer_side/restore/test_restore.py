"""Restore of real files by one rank and by several: every bit, in place, with 1/R read, and never a wrong byte."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.crc import crc32
from holdfast.errors import DamageError, PeerLost, StateError, StoreError, StoreMissing
from holdfast.image.manifest import Manifest, State, manifest_name
from holdfast.ring.doubts import DoubtedSteps
from holdfast.store.posix import PosixStore
from holdfast.telemetry.events import EventLog
from holdfast.wire.doubt import Doubt
from tests.support.checkpoints import manifest_of
from tests.support.restoring import CountingStore, Ranks, ThreadPeers, publish
from tests.support.slices import DictTier, checkpoint
from trainer_side.ranks.peers import LonePeers
from trainer_side.restore import targets as targets_module
from trainer_side.restore.restore import restore
from trainer_side.restore.restore_attempt import Restored, RestoreOptions
from trainer_side.state.per_rank import PerRank
from trainer_side.state.per_rank_blob import encode, reserve_bytes
from trainer_side.state.rng import RngState
from trainer_side.state.tree import tensor_paths


class Net(nn.Module):
    """Tied weights, batch norm, bfloat16, and a weight of many chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, 64)
        self.body = nn.Sequential(nn.Linear(64, 300), nn.BatchNorm1d(300), nn.Linear(300, 64))
        self.brief = nn.Linear(64, 64, dtype=torch.bfloat16)
        self.head = nn.Linear(64, 60, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.body(self.embed(tokens))
        out = self.head(self.brief(hidden.to(torch.bfloat16)).float())
        assert isinstance(out, torch.Tensor)
        return out


class Run:
    """A training: model, optimizer and scheduler."""

    def __init__(self, seed: int, steps: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randint(0, 60, (8,))).square().sum().backward()
            self.optimizer.step()
            self.scheduler.step()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def tree(self) -> dict[str, Any]:
        return {name: value.state_dict() for name, value in self.state.items()}

    def loss(self) -> list[float]:
        """Return the next losses, which are equal only if the whole state is."""
        torch.manual_seed(99)
        losses = []
        for _ in range(3):
            self.optimizer.zero_grad()
            loss = self.model(torch.randint(0, 60, (8,))).square().sum()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses


def assert_same(found: Any, expected: Any) -> None:
    """Assert equality bit for bit, with the same types."""
    mine, theirs = tensor_paths(found), tensor_paths(expected)
    assert [path for path, _ in mine] == [path for path, _ in theirs]
    for (path, tensor), (_, other) in zip(mine, theirs, strict=True):
        assert (tensor.dtype, tensor.shape, tensor.device) == (other.dtype, other.shape, other.device), path
        same = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(same, other.detach().contiguous().reshape(-1).view(torch.uint8)), path


def bring_back(run: Run | Mapping[str, Any], root: Path, **options: Any) -> Restored:
    state = run.state if isinstance(run, Run) else run
    restored = restore(
        state, CountingStore(root), LonePeers(), events=None, options=RestoreOptions(**options)
    )
    assert restored is not None
    return restored


def flip(root: Path, manifest: Manifest, offset: int) -> None:
    path = root / manifest.file
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def place_of(manifest: Manifest, path: str) -> int:
    """Return the file offset of the middle of a tensor's storage."""
    entry = manifest.entries[next(record.entry for record in manifest.tensors if record.path == path)]
    return entry.offset + entry.nbytes // 2


def mark_drifted(root: Path, manifest: Manifest) -> str:
    """Mark the checkpoint like a stager after rank 1 differed."""
    drifted = manifest.model_copy(update={"state": State.DURABLE, "drift": "rank 1 differs in model/w"})
    (root / manifest_name(manifest.file)).write_bytes(drifted.to_bytes())
    return drifted.drift


def test_the_step_before_replicas_drifted_is_preferred_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (4, 5, 6):
        manifest = publish(tmp_path, step, {"x": torch.full((9,), float(step))})
        if step > 4:
            drift = mark_drifted(tmp_path, manifest)
    state = {"x": torch.zeros(9)}
    assert bring_back(state, tmp_path).step == 4
    assert torch.equal(state["x"], torch.full((9,), 4.0))
    assert caplog.text.count(f"{drift}; an older checkpoint is preferred") == 1
    assert bring_back(state, tmp_path, step=6).step == 6, "who asks for it gets it"
    assert f"{drift}; step 6 (attempt 1) is restored all the same, as there is no other" in caplog.text


def test_the_step_before_those_that_are_doubtful_is_preferred_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (4, 5, 6):
        manifest = publish(tmp_path, step, {"x": torch.full((9,), float(step))})
        if step > 4:
            doubtful = manifest.with_doubt(f"step {step}: model/w was changed after save(7)")
            (tmp_path / manifest_name(manifest.file)).write_bytes(doubtful.to_bytes())
    state = {"x": torch.zeros(9)}
    assert bring_back(state, tmp_path).step == 4
    assert "step 6: model/w was changed after save(7); an older checkpoint is preferred" in caplog.text
    assert bring_back(state, tmp_path, step=6).step == 6, "who asks for it gets it"


def test_slices_that_are_doubtful_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The slices are in a local tier, of a job without a stager."""
    tier = DictTier()
    for step in (4, 5):
        saved = {"x": torch.full((9,), float(step))}
        tier.put(checkpoint(lambda _rank, saved=saved: saved, ranks=1, step=step), 0)  # type: ignore[misc]
    tier.record_doubt(DoubtedSteps(1, Doubt(0, (5, 5), "model/w was changed after save(6)")))
    state = {"x": torch.zeros(9)}
    found = restore(state, PosixStore(tmp_path), LonePeers(), events=None, tiers=[tier])
    assert found is not None
    assert found.step == 4
    assert "model/w was changed after save(6)" in caplog.text


def test_a_drifted_checkpoint_is_better_than_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = (publish(tmp_path, step, {"x": torch.full((9,), float(step))}) for step in (4, 5))
    mark_drifted(tmp_path, new)
    (tmp_path / old.file).unlink()
    assert bring_back({"x": torch.zeros(9)}, tmp_path).step == 5
    assert "is restored all the same" in caplog.text


# -- what comes back -------------------------------------------------------------------------------------------------


def test_a_run_comes_back_bit_for_bit_and_goes_on_the_same(tmp_path: Path) -> None:
    saved = Run(1, steps=3)
    publish(tmp_path, 41, saved.tree())
    fresh = Run(2)
    restored = bring_back(fresh, tmp_path)
    assert (restored.step, restored.attempt, restored.skipped) == (41, 1, [])
    assert {"catalog", "structure", "read", "load"} <= set(restored.seconds)
    assert_same(fresh.tree(), saved.tree())
    assert fresh.model.head.weight is fresh.model.embed.weight
    assert fresh.optimizer.state_dict()["param_groups"] == saved.optimizer.state_dict()["param_groups"]
    assert fresh.loss() == saved.loss()


@pytest.mark.parametrize("chunk_bytes", [4096, 8192, 1 << 20])
def test_a_file_of_any_chunk_size_is_restored_whole(tmp_path: Path, chunk_bytes: int) -> None:
    saved = Run(1, steps=1)
    manifest = publish(tmp_path, 0, saved.tree(), chunk_bytes=chunk_bytes)
    fresh = Run(2)
    restored = bring_back(fresh, tmp_path)
    assert_same(fresh.tree(), saved.tree())
    assert restored.bytes_read == manifest.image_bytes


def test_adamw_step_counters_keep_dtype_and_device(tmp_path: Path) -> None:
    saved = Run(1, steps=2)
    publish(tmp_path, 0, saved.tree())
    fresh = Run(2)
    bring_back(fresh, tmp_path)
    for mine, theirs in zip(fresh.optimizer.state.values(), saved.optimizer.state.values(), strict=True):
        assert mine["step"].dtype is torch.float32
        assert mine["step"].device.type == "cpu"
        assert mine["step"].item() == theirs["step"].item() == 2.0


def test_moments_of_another_dtype_than_their_parameter_come_back_as_they_were(tmp_path: Path) -> None:
    """torch's own loading would cast them to the parameter's dtype."""
    run, fresh = Run(1, steps=2), Run(2)
    for state in run.optimizer.state.values():
        state["exp_avg"] = torch.randn(state["exp_avg"].shape, dtype=torch.float32)
    publish(tmp_path, 1, run.tree())
    bring_back(fresh, tmp_path)
    assert_same(fresh.optimizer.state_dict(), run.optimizer.state_dict())


def test_new_run_has_nothing_and_leaves_the_state_alone(tmp_path: Path) -> None:
    fresh = Run(2)
    before = {path: tensor.clone() for path, tensor in tensor_paths(fresh.tree())}
    assert restore(fresh.state, CountingStore(tmp_path / "run"), LonePeers(), events=None) is None
    assert_same(dict(tensor_paths(fresh.tree())), before)


def test_tensors_in_place_and_plain_values_by_name(tmp_path: Path) -> None:
    counter = torch.arange(5)
    publish(tmp_path, 7, {"counter": counter, "note": "tea", "table": {1: [2.5, "a/b"], "x": torch.ones(2)}})
    target = torch.zeros(5, dtype=torch.int64)
    address = target.data_ptr()
    restored = bring_back({"counter": target, "note": "", "table": {}}, tmp_path)
    assert target.tolist() == [0, 1, 2, 3, 4]
    assert target.data_ptr() == address
    assert restored.values["note"] == "tea"
    assert restored.values["table"][1] == [2.5, "a/b"]
    assert torch.equal(restored.values["table"]["x"], torch.ones(2))


class Holder:
    """An object that returns the value that it was given as its state."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


def test_odd_trees(tmp_path: Path) -> None:
    base = torch.arange(1000.0)
    tree = {
        "a/b": torch.ones(3),
        "a": {"b": torch.full((3,), 2.0), 0: torch.zeros(0), "0": torch.tensor(5)},
        "views": [base[:10], base[5:].view(5, 199), base[::2]],
        "strided": torch.arange(12).reshape(3, 4).t(),
        "tuple": (
            torch.tensor([True, False]),
            torch.tensor([1 + 2j]),
            OrderedDict(x=torch.tensor(3, dtype=torch.uint8)),
        ),
        "empty": [torch.zeros(0), torch.zeros(0, 4)],
        "parameter": nn.Parameter(torch.rand(9)),
    }
    publish(tmp_path, 0, {"odd": tree})
    for target in (Holder(None), Holder({"a/b": torch.zeros(3), "a": {"b": torch.zeros(3)}}), Holder(tree)):
        bring_back({"odd": target}, tmp_path)
        assert_same(target.value, tree)
        views = target.value["views"]
        assert views[0].untyped_storage().data_ptr() == views[1].untyped_storage().data_ptr()
        assert isinstance(target.value["parameter"], nn.Parameter)


def test_no_tensors_at_all(tmp_path: Path) -> None:
    publish(tmp_path, 3, {"note": "only words"})
    assert bring_back({"note": ""}, tmp_path).values == {"note": "only words"}


# -- in place --------------------------------------------------------------------------------------------------------


def test_live_tensors_are_read_into_directly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Run(1, steps=1)
    publish(tmp_path, 0, saved.tree())
    fresh = Run(2, steps=1)
    before = {path: tensor.data_ptr() for path, tensor in tensor_paths(fresh.tree())}
    seen: dict[str, int] = {}
    genuine = nn.Module.load_state_dict

    def spy(self: nn.Module, tree: Any, *rest: Any, **options: Any) -> Any:
        seen.update({f"model/{name}": tensor.data_ptr() for name, tensor in tree.items()})
        return genuine(self, tree, *rest, **options)

    monkeypatch.setattr(nn.Module, "load_state_dict", spy)
    bring_back(fresh, tmp_path)
    assert_same(fresh.tree(), saved.tree())
    # The module gets its own memory back: nothing was copied. The optimizer's tensors stay in place.
    assert seen == {path: address for path, address in before.items() if path.startswith("model/")}
    assert {path: tensor.data_ptr() for path, tensor in tensor_paths(fresh.tree())} == before


def test_other_ties_than_the_file_get_memory_of_their_own(tmp_path: Path) -> None:
    tied = torch.rand(40)
    publish(tmp_path, 0, {"x": {"a": tied, "b": tied, "c": torch.ones(40), "d": torch.zeros(40)}})
    shared = torch.empty(40)
    target = Holder({"a": torch.empty(40), "b": torch.empty(40), "c": shared, "d": shared})
    bring_back({"x": target}, tmp_path)
    assert torch.equal(target.value["a"], tied)
    assert torch.equal(target.value["b"], tied)
    assert torch.equal(target.value["c"], torch.ones(40))
    assert torch.equal(target.value["d"], torch.zeros(40))


@pytest.mark.parametrize("begin", [0, 10])
def test_part_of_a_larger_storage_is_not_read_over(tmp_path: Path, begin: int) -> None:
    publish(tmp_path, 0, {"x": torch.ones(10)})
    large = [torch.full((30,), 7.0) for _ in range(2)]

    def work(peers: ThreadPeers) -> Restored | None:
        target = large[peers.rank][begin : begin + 10]
        return restore({"x": target}, CountingStore(tmp_path), peers, events=None)

    Ranks(2).run(work)
    for tensor in large:
        assert tensor.tolist() == [7.0] * begin + [1.0] * 10 + [7.0] * (20 - begin)


def test_two_tensors_over_one_memory_are_not_read_over(tmp_path: Path) -> None:
    publish(tmp_path, 0, {"x": {"a": torch.ones(16), "b": torch.zeros(8)}})
    array = torch.empty(16).numpy()
    target = Holder({"a": torch.from_numpy(array), "b": torch.from_numpy(array[8:])})
    bring_back({"x": target}, tmp_path)
    assert torch.equal(target.value["a"], torch.ones(16))
    assert torch.equal(target.value["b"], torch.zeros(8))


def test_another_dtype_is_converted_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    publish(tmp_path, 0, {"x": torch.full((5,), 1.5)})
    target = torch.zeros(5, dtype=torch.bfloat16)
    bring_back({"x": target}, tmp_path)
    assert target.tolist() == [1.5] * 5
    assert "x: torch.float32 to torch.bfloat16" in caplog.text


# -- several ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_reads_its_share_and_gets_the_rest_from_the_others(tmp_path: Path, ranks: int) -> None:
    saved = Run(1, steps=2)
    manifest = publish(tmp_path, 5, saved.tree())
    runs = [Run(10 + rank) for rank in range(ranks)]
    stores = [CountingStore(tmp_path) for _ in range(ranks)]

    def work(peers: ThreadPeers) -> Restored | None:
        return restore(runs[peers.rank].state, stores[peers.rank], peers, events=None)

    results = Ranks(ranks).run(work)
    assert [result.step for result in results if result] == [5] * ranks
    for run in runs:
        assert_same(run.tree(), saved.tree())
    expected_loss = saved.loss()
    for run in runs:
        assert run.loss() == expected_loss
    # Rank 0 also reads head and tail, for the structure.
    structure_bytes = manifest.image_bytes - sum(
        entry.nbytes for entry in manifest.entries if "/data/" in entry.name
    )
    slack_bytes = 2 * manifest.chunk_bytes
    assert sum(store.bytes_read for store in stores) <= manifest.image_bytes + structure_bytes
    for rank, store in enumerate(stores):
        assert store.bytes_read <= manifest.image_bytes / ranks + slack_bytes + (
            structure_bytes if rank == 0 else 0
        )


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_requests_are_shared_out_evenly_among_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    """Saved by two. One rank requests each byte once, and all ranks request equal amounts."""
    chunk_bytes, request_bytes = 16384, 8192
    saved: dict[str, Any] = {
        "x": torch.arange(100_000),
        "y": [torch.full((n,), 1.0) for n in range(1, 60)],
    }
    manifest = publish(tmp_path, 5, saved, ranks=2, chunk_bytes=chunk_bytes)
    stores = [CountingStore(tmp_path, request_bytes=request_bytes) for _ in range(ranks)]
    results = Ranks(ranks).run(
        lambda peers: restore(
            {"x": torch.zeros(100_000, dtype=torch.int64), "y": []}, stores[peers.rank], peers, events=None
        )
    )
    assert all(
        torch.equal(a, b) for r in results if r for a, b in zip(r.values["y"], saved["y"], strict=True)
    )
    structure = stores[0].requests[:2]  # head and tail
    reads = [store.requests for store in stores]
    reads[0] = reads[0][2:]
    position = 0
    for offset, nbytes in sorted(request for own in reads for request in own):
        assert offset == position
        assert nbytes == min(request_bytes, manifest.image_bytes - offset)
        position += nbytes
    assert position == manifest.image_bytes
    per_chunk = chunk_bytes // request_bytes
    counts = [len(own) for own in reads]
    assert max(counts) - min(counts) <= per_chunk
    for rank, result in enumerate(results):
        assert result is not None
        assert result.bytes_read == sum(nbytes for _, nbytes in reads[rank])
    assert sum(nbytes for _, nbytes in structure) < manifest.image_bytes / 10


@pytest.mark.parametrize("threads", [1, 3])
def test_memory_beside_the_tensors_is_one_window_for_each_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    taken: list[int] = []
    genuine = targets_module.ReadWindow.of_size

    def spy(nbytes: int) -> Any:
        taken.append(nbytes)
        return genuine(nbytes)

    monkeypatch.setattr(targets_module.ReadWindow, "of_size", spy)
    publish(tmp_path, 5, {"x": torch.arange(500_000)}, chunk_bytes=1 << 20)
    store = CountingStore(tmp_path, request_bytes=1 << 17)
    target = torch.zeros(500_000, dtype=torch.int64)
    restore({"x": target}, store, LonePeers(), events=None, options=RestoreOptions(threads=threads))
    assert torch.equal(target, torch.arange(500_000))
    assert 1 <= len(taken) <= threads
    assert set(taken) == {1 << 17}
    assert max(nbytes for _, nbytes in store.requests) == 1 << 17


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_byte_is_summed_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    summed: list[int] = []

    def spy(data: memoryview, start: int = 0) -> int:
        summed.append(data.nbytes)
        return crc32(data, start)

    monkeypatch.setattr(targets_module, "crc32", spy)
    manifest = publish(tmp_path, 5, {"x": torch.arange(50_000), "y": torch.ones(3)})
    Ranks(ranks).run(
        lambda peers: restore(
            {"x": torch.zeros(50_000, dtype=torch.int64), "y": torch.zeros(3)},
            CountingStore(tmp_path),
            peers,
            events=None,
        )
    )
    assert manifest.image_bytes <= sum(summed) <= ranks * manifest.image_bytes


def test_the_exchange_goes_on_while_a_rank_waits_for_its_own_chunk(tmp_path: Path) -> None:
    manifest = publish(tmp_path, 5, {"x": torch.arange(5000)})

    def work(peers: ThreadPeers) -> Restored | None:
        store = CountingStore(tmp_path)

        def hold(name: str, offset: int) -> None:
            polled = time.monotonic() + 60
            while offset == last and peers.polls < 3:
                assert time.monotonic() < polled, "nobody moves the exchange on"
                time.sleep(1e-3)

        store.before_read = hold
        return restore({"x": torch.zeros(5000, dtype=torch.int64)}, store, peers, events=None)

    last = (manifest.image_bytes - 1) // manifest.chunk_bytes * manifest.chunk_bytes
    assert all(Ranks(2).run(work))


def test_more_ranks_than_chunks(tmp_path: Path) -> None:
    publish(tmp_path, 5, {"x": torch.arange(10)}, chunk_bytes=1 << 20)
    targets = [torch.zeros(10, dtype=torch.int64) for _ in range(3)]
    Ranks(3).run(
        lambda peers: restore({"x": targets[peers.rank]}, CountingStore(tmp_path), peers, events=None)
    )
    assert all(target.tolist() == list(range(10)) for target in targets)


def test_a_bit_that_flips_between_ranks_is_seen(tmp_path: Path) -> None:
    for step in (1, 2):
        publish(tmp_path, step, {"x": torch.full((5000,), float(step))})
    flipped: list[int] = []

    def spoil(rank: int, memory: memoryview) -> None:
        if rank == 1 and not flipped:
            flipped.append(1)
            memory[len(memory) // 2] ^= 4

    targets = [torch.zeros(5000) for _ in range(2)]
    results = Ranks(2, flip=spoil).run(
        lambda peers: restore({"x": targets[peers.rank]}, CountingStore(tmp_path), peers, events=None)
    )
    assert flipped
    assert [result.step for result in results if result] == [1, 1]
    assert all("after the exchange" in result.skipped[0] for result in results if result)
    assert all(torch.equal(target, torch.ones(5000)) for target in targets)


def test_damage_that_only_one_rank_sees_leads_all_to_the_step_before(tmp_path: Path) -> None:
    old, new = Run(1, steps=1), Run(1, steps=2)
    publish(tmp_path, 1, old.tree())
    manifest = publish(tmp_path, 2, new.tree())
    last = max(manifest.entries, key=lambda entry: entry.offset if "/data/" in entry.name else -1)
    flip(tmp_path, manifest, last.offset)  # in the share of the last rank
    runs = [Run(10 + rank) for rank in range(3)]
    results = Ranks(3).run(
        lambda peers: restore(runs[peers.rank].state, CountingStore(tmp_path), peers, events=None)
    )
    for result, run in zip(results, runs, strict=True):
        assert result is not None
        assert result.step == 1
        assert "step 2" in result.skipped[0]
        assert "rank 2: " in result.skipped[0]
        assert "CRC-32" in result.skipped[0]
        # The others received the damaged bytes, but did not detect the damage first.
        assert "rank 0: " not in result.skipped[0]
        assert_same(run.tree(), old.tree())


def test_a_rank_with_another_shape_makes_all_ranks_refuse(tmp_path: Path) -> None:
    publish(tmp_path, 1, {"x": torch.ones(10)})
    targets = [torch.zeros(10), torch.zeros(11)]
    _, errors = Ranks(2).outcomes(
        lambda peers: restore({"x": targets[peers.rank]}, CountingStore(tmp_path), peers, events=None)
    )
    assert [type(error) for error in errors] == [StateError, StateError]
    assert "rank 1: " in str(errors[0])
    assert "expected [11], the checkpoint has [10]" in str(errors[0])
    assert torch.equal(targets[0], torch.zeros(10))


def test_a_store_that_fails_on_one_rank_fails_on_all_and_is_not_called_damage(tmp_path: Path) -> None:
    for step in (1, 2):
        publish(tmp_path, step, {"x": torch.ones(9000)})

    def fail(name: str, offset: int) -> None:
        raise StoreError("no route to store", retriable=True)

    def work(peers: ThreadPeers) -> Restored | None:
        store = CountingStore(tmp_path)
        store.before_read = fail if peers.rank == 1 else None
        return restore({"x": torch.zeros(9000)}, store, peers, events=None)

    _, errors = Ranks(2).outcomes(work)
    assert all(type(error) is StoreError and "no route" in str(error) for error in errors)


def test_a_rank_that_leaves_is_missed(tmp_path: Path) -> None:
    publish(tmp_path, 1, {"x": torch.ones(9000)})

    def work(peers: ThreadPeers) -> Restored | None:
        if peers.rank == 1:
            raise KeyboardInterrupt
        return restore({"x": torch.zeros(9000)}, CountingStore(tmp_path), peers, events=None)

    _, errors = Ranks(2).outcomes(work)
    assert isinstance(errors[0], PeerLost)


# -- PerRank and random states ---------------------------------------------------------------------------------------


def blobs_of(values: list[Any]) -> list[torch.Tensor]:
    """Return one blob per rank, all of one size, as in a checkpoint."""
    encoded = [encode(value, name="own") for value in values]
    room = reserve_bytes(max(map(len, encoded)))
    return [torch.frombuffer(bytearray(blob.ljust(room, b"\0")), dtype=torch.uint8) for blob in encoded]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_gets_its_own_value_and_new_ranks_keep_theirs(
    tmp_path: Path, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    saved = [{"seed": torch.full((9,), float(rank)), "name": f"rank {rank}"} for rank in range(2)]
    publish(tmp_path, 0, {"x": torch.ones(3000), "own": blobs_of(saved)}, ranks=2)
    own = [PerRank(Holder({"name": "new"})) for _ in range(ranks)]
    Ranks(ranks).run(
        lambda peers: restore(
            {"own": own[peers.rank], "x": torch.zeros(3000)}, CountingStore(tmp_path), peers, events=None
        )
    )
    expected = ["rank 0", "rank 1", "new"][:ranks]
    assert [value.value.value["name"] for value in own] == expected
    for rank in range(min(ranks, 2)):
        assert own[rank].value.value["seed"].tolist() == [float(rank)] * 9
    assert ("none for rank 2" in caplog.text) == (ranks == 3)
    other = f"step 0 was saved by 2 ranks, and this job has {ranks}: the whole state is resumed"
    assert caplog.text.count(other) == (ranks != 2)


def test_a_value_shared_out_among_ranks_needs_as_many_again(tmp_path: Path) -> None:
    publish(tmp_path, 0, {"own": blobs_of(["a", "b"])}, ranks=2)

    def bring(peers: ThreadPeers) -> Any:
        own = PerRank(None, same_ranks=True)
        restore({"own": own}, CountingStore(tmp_path), peers, events=None)
        return own.value

    assert Ranks(2).run(bring) == ["a", "b"]
    for ranks in (1, 3):
        _, errors = Ranks(ranks).outcomes(bring)
        assert [type(error) for error in errors] == [StateError] * ranks
        assert f"own: expected 2 ranks, as when it was saved, got {ranks}" in str(errors[0])


def test_plain_per_rank_values_are_replaced(tmp_path: Path) -> None:
    publish(tmp_path, 0, {"own": blobs_of([[1, 2, "c"]])})
    own = PerRank([0])
    bring_back({"own": own}, tmp_path)
    assert own.value == [1, 2, "c"]


def test_a_value_not_saved_per_rank_is_refused(tmp_path: Path) -> None:
    publish(tmp_path, 0, {"own": {"a": 1}})
    with pytest.raises(StateError, match="own: is PerRank in the state, but was not"):
        bring_back({"own": PerRank(Holder(None))}, tmp_path)


class Gambler(Holder):
    """Draws random numbers while it is loaded."""

    def load_state_dict(self, value: Any) -> None:
        torch.rand(5)
        super().load_state_dict(value)


@pytest.mark.parametrize("per_rank", [False, True])
def test_random_numbers_go_on_where_they_were(tmp_path: Path, per_rank: bool) -> None:
    torch.manual_seed(5)
    rng = RngState()
    saved = blobs_of([rng.state_dict()]) if per_rank else rng.state_dict()
    publish(tmp_path, 0, {"rng": saved, "a": {"x": 1}, "own": blobs_of([{"x": 1}])})
    expected = torch.rand(4)
    torch.manual_seed(6)
    state = {"rng": PerRank(rng) if per_rank else rng, "a": Gambler(None), "own": PerRank(Gambler(None))}
    bring_back(state, tmp_path)
    assert torch.equal(torch.rand(4), expected)


def test_restoring_draws_no_random_numbers(tmp_path: Path) -> None:
    publish(tmp_path, 0, Run(1, steps=1).tree())
    fresh = Run(2)
    before = torch.get_rng_state()
    bring_back(fresh, tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_object_that_cannot_be_loaded_is_refused_at_once(tmp_path: Path) -> None:
    class Mute:
        def state_dict(self) -> dict[str, int]:
            return {}

    publish(tmp_path, 0, {"a": {}, "x": torch.ones(3)})
    target = torch.zeros(3)
    with pytest.raises(StateError, match="'a': state_dict\\(\\) is there"):
        bring_back({"a": Mute(), "x": target}, tmp_path)
    assert target.tolist() == [0, 0, 0]


def test_a_restore_is_told_in_the_event_log(tmp_path: Path) -> None:
    publish(tmp_path / "run", 1, {"x": torch.ones(3000)})
    manifest = publish(tmp_path / "run", 2, {"x": torch.ones(3000)})
    flip(tmp_path / "run", manifest, place_of(manifest, "x"))
    log = EventLog(tmp_path / "events", role="trainer", rank=0)
    restore({"x": torch.zeros(3000)}, CountingStore(tmp_path / "run"), LonePeers(), events=log)
    log.close()
    skipped, restored = (json.loads(line) for line in (tmp_path / "events").read_text().splitlines())
    assert skipped["event"] == "skipped"
    assert "step 2" in skipped["reason"]
    assert restored["event"] == "restore"
    assert restored["step"] == 1
    assert restored["in_place_bytes"] == 12000
    assert restored["bytes_read"] == (tmp_path / "run" / "step-000000001.pt").stat().st_size


# -- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "where", ["model/body.0.weight", "model/brief.bias", "optimizer/state/0/exp_avg", "pickle", "directory"]
)
def test_a_flipped_byte_anywhere_leads_to_the_step_before(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = Run(1, steps=1), Run(1, steps=2)
    publish(tmp_path, 10, old.tree())
    manifest = publish(tmp_path, 20, new.tree())
    pickled = next(entry for entry in manifest.entries if entry.name.endswith("data.pkl"))
    places = {"pickle": pickled.offset + 50, "directory": manifest.image_bytes - 40}
    flip(tmp_path, manifest, places[where] if where in places else place_of(manifest, where))
    fresh = Run(2, steps=1)
    restored = bring_back(fresh, tmp_path)
    assert restored.step == 10
    assert_same(fresh.tree(), old.tree())
    assert len(restored.skipped) == 1
    assert "step 20 (attempt 1)" in caplog.text
    assert "trying step 10 (attempt 1) instead" in caplog.text


def test_short_missing_and_bad_files_are_passed_over_each_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish(tmp_path, 0, {"x": torch.ones(3000)})
    manifest = publish(tmp_path, 1, {"x": torch.zeros(3000)})
    flip(tmp_path, manifest, place_of(manifest, "x"))
    for step in (2, 3, 4, 5):
        manifest = publish(tmp_path, step, {"x": torch.full((3000,), float(step))})
        path = tmp_path / manifest.file
        if step == 2:
            path.write_bytes(path.read_bytes()[:-1000])
        elif step == 3:
            path.unlink()
        elif step == 4:
            bad = manifest.model_copy(update={"state": State.BAD, "note": "chunk 1"})
            (tmp_path / manifest_name(manifest.file)).write_bytes(bad.to_bytes())
        else:
            (tmp_path / manifest_name(manifest.file)).write_bytes(b"{}")
    target = torch.zeros(3000)
    restored = bring_back({"x": target}, tmp_path)
    assert restored.step == 0
    assert torch.equal(target, torch.ones(3000))
    for number, reason in zip((5, 4, 3, 2, 1), restored.skipped, strict=True):
        assert f"step-00000000{number}" in reason
    said = [record.getMessage() for record in caplog.records if record.name == "holdfast.restore"]
    assert said.pop().startswith("resumed from step ")
    assert ["trying step 1 (attempt 1) instead" in text for text in said] == [True] * 4 + [False]
    assert "trying step 0 (attempt 1) instead" in said[4]


@pytest.mark.parametrize("how", ["cut", "gone"])
def test_a_file_that_is_lost_while_it_is_read(tmp_path: Path, how: str) -> None:
    publish(tmp_path, 1, {"x": torch.ones(9000)})
    manifest = publish(tmp_path, 2, {"x": torch.zeros(9000)})
    path, store = tmp_path / manifest.file, CountingStore(tmp_path)

    def spoil(name: str, offset: int) -> None:
        if name == manifest.file and offset and path.exists():
            path.write_bytes(path.read_bytes()[:5000]) if how == "cut" else path.unlink()

    store.before_read = spoil
    target = torch.full((9000,), 3.0)
    restored = restore({"x": target}, store, LonePeers(), events=None)
    assert restored is not None
    assert restored.step == 1
    assert torch.equal(target, torch.ones(9000))


def test_the_error_names_all_checkpoints_when_none_is_good(tmp_path: Path) -> None:
    for step in (1, 2):
        manifest = publish(tmp_path, step, {"x": torch.ones(3000)})
        flip(tmp_path, manifest, place_of(manifest, "x"))
    with pytest.raises(DamageError) as caught:
        bring_back({"x": torch.zeros(3000)}, tmp_path)
    assert "none of 2 checkpoints" in str(caught.value)
    assert "step 1 (attempt 1)" in str(caught.value)
    assert "step 2 (attempt 1)" in str(caught.value)


def test_a_manifest_of_another_file_is_damage(tmp_path: Path) -> None:
    manifest = publish(tmp_path, 1, {"x": torch.ones(30), "y": torch.zeros(30)})
    swapped = tuple(
        record.model_copy(update={"entry": other.entry})
        for record, other in zip(manifest.tensors, reversed(manifest.tensors), strict=True)
    )
    wrong = manifest.model_copy(update={"tensors": swapped})
    (tmp_path / manifest_name(manifest.file)).write_bytes(wrong.to_bytes())
    with pytest.raises(DamageError, match="the manifest says"):
        bring_back({"x": torch.zeros(30), "y": torch.zeros(30)}, tmp_path)


def test_a_type_that_torch_does_not_allow_is_not_called_damage(tmp_path: Path) -> None:
    publish(tmp_path, 1, {"x": torch.ones(30)})
    torch.save({"x": torch.ones(30), "y": Path("a")}, tmp_path / "other.pt")
    image = (tmp_path / "other.pt").read_bytes()
    manifest = manifest_of(image, step=2)
    (tmp_path / manifest.file).write_bytes(image)
    (tmp_path / manifest_name(manifest.file)).write_bytes(manifest.to_bytes())
    with pytest.raises(StateError, match="add_safe_globals"):
        bring_back({"x": torch.zeros(30)}, tmp_path)


# -- what does not fit -----------------------------------------------------------------------------------------------


def test_wrong_shapes_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    manifest = publish(tmp_path, 1, {"first": torch.ones(9000), "model": nn.Linear(4, 5).state_dict()})
    first, store = torch.zeros(9000), CountingStore(tmp_path)
    with pytest.raises(StateError) as caught:
        restore({"first": first, "model": nn.Linear(4, 6)}, store, LonePeers(), events=None)
    assert "model/weight: expected [6, 4], the checkpoint has [5, 4]" in str(caught.value)
    assert "model/bias: expected [6], the checkpoint has [5]" in str(caught.value)
    assert torch.equal(first, torch.zeros(9000))
    assert store.bytes_read < manifest.image_bytes / 2


def test_names_that_are_missing_are_refused_and_extra_ones_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish(tmp_path, 1, {"a": torch.ones(3), "b": torch.ones(3)})
    with pytest.raises(StateError, match="no 'c', 'd'; it has 'a', 'b'"):
        bring_back({"a": torch.zeros(3), "d": torch.zeros(3), "c": 1}, tmp_path)
    bring_back({"a": torch.zeros(3)}, tmp_path)
    assert "are not restored: 'b'" in caplog.text


def test_an_object_that_refuses_its_state_is_named(tmp_path: Path) -> None:
    class Picky(Holder):
        def load_state_dict(self, value: Any) -> None:
            raise KeyError("bias")

    publish(tmp_path, 1, {"model": nn.Linear(3, 3).state_dict()})
    with pytest.raises(StateError, match=r"model: load_state_dict\(\) of Picky refused .*'bias'"):
        bring_back({"model": Picky(None)}, tmp_path)


def test_a_certain_step(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        manifest = publish(tmp_path, step, {"x": torch.full((3000,), float(step))})
    target = torch.zeros(3000)
    assert bring_back({"x": target}, tmp_path, step=2).step == 2
    assert target[0] == 2.0
    with pytest.raises(StoreMissing, match="no checkpoint of step 9; the newest is 3"):
        bring_back({"x": target}, tmp_path, step=9)
    flip(tmp_path, manifest, place_of(manifest, "x"))
    with pytest.raises(DamageError, match="none of 1 checkpoints"):
        bring_back({"x": target}, tmp_path, step=3)


def test_a_later_attempt_is_newer_than_a_higher_step(tmp_path: Path) -> None:
    publish(tmp_path, 9, {"x": torch.ones(3)}, attempt=1)
    publish(tmp_path, 5, {"x": torch.zeros(3)}, attempt=2)
    restored = bring_back({"x": torch.ones(3)}, tmp_path)
    assert (restored.step, restored.attempt) == (5, 2)


def test_a_store_that_hangs_ends_at_the_deadline(tmp_path: Path) -> None:
    publish(tmp_path, 1, {"x": torch.ones(9000)})
    store, release = CountingStore(tmp_path), threading.Event()
    threads_of_reading: list[str] = []

    def hang(name: str, offset: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            threads_of_reading.append(threading.current_thread().name)
            release.wait(60)

    store.before_read = hang
    try:
        with pytest.raises(StoreError, match="slow or hanging"):
            restore(
                {"x": torch.zeros(9000)},
                store,
                LonePeers(),
                events=None,
                options=RestoreOptions(seconds_max=4.0),
            )
    finally:
        release.set()
    assert threads_of_reading


@pytest.mark.parametrize("hanging", [False, True])
def test_a_reader_that_is_still_under_way_does_not_write_over_the_next_candidate(
    tmp_path: Path, hanging: bool
) -> None:
    publish(tmp_path, 1, {"x": torch.ones(9000)})
    manifest = publish(tmp_path, 2, {"x": torch.zeros(9000)})
    flip(tmp_path, manifest, manifest.chunk_bytes + 100)
    store, release, held = CountingStore(tmp_path), threading.Event(), threading.Event()

    def hold(name: str, offset: int) -> None:
        if name == manifest.file and offset == 3 * manifest.chunk_bytes:
            held.set()
            if not hanging:
                threading.Timer(0.3, release.set).start()
            release.wait(60)
        elif name == manifest.file and offset == manifest.chunk_bytes:
            held.wait(60)  # the damage is detected while the other request is in flight

    store.before_read = hold
    target = torch.zeros(9000)
    try:
        if hanging:
            with pytest.raises(StoreError, match="slow or hanging"):
                restore(
                    {"x": target}, store, LonePeers(), events=None, options=RestoreOptions(seconds_max=2.0)
                )
        else:
            restored = restore({"x": target}, store, LonePeers(), events=None)
            assert restored is not None
            assert restored.step == 1
            assert release.is_set()
            assert torch.equal(target, torch.ones(9000))
    finally:
        release.set()
    assert held.is_set()
