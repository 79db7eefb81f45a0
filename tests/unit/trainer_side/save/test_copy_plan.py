"""The route of a copy: every piece once, in the order of updates, in few batches, none of which delays a layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import pytest
import torch

from tests.unit.trainer_side.slices import laid_out, sliced, source_of, tensors_of
from trainer_side.save.copy_plan import BATCH_BYTES_MAX, Batch, Router, SlicePlan, batches
from trainer_side.state.survey import StorageSource


def _state(sizes: list[int]) -> tuple[list[torch.Tensor], list[StorageSource | None]]:
    tensors = tensors_of(sizes)
    return tensors, [source_of(entry, tensor) for entry, tensor in enumerate(tensors)]


def _entries(found: Iterable[Batch]) -> list[int]:
    return [piece.entry for batch in found for piece in batch.pieces]


def test_ten_thousand_small_tensors_are_few_batches() -> None:
    sizes = [4096] * 10_000
    plan = sliced(sizes)
    tensors, sources = _state(sizes)
    route = Router(plan).route(sources, dict, order_changed=True)
    assert len(route.host) <= 100
    assert all(batch.nbytes <= BATCH_BYTES_MAX for batch in route.host)
    assert Counter(piece for batch in route.host for piece in batch.pieces) == Counter(plan.gated)
    told = [storage for batch in route.host for storage in batch.released_storages]
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert sorted(told) == sorted(addresses), "a storage is given free twice, or never"
    assert route.storages == set(told)
    arrived: Counter[int] = Counter()
    for batch in route.host:
        arrived.update(batch.frames)
    assert arrived == Counter(piece.frame for piece in plan.gated)


def test_a_small_state_still_goes_layer_by_layer() -> None:
    sizes = [64] * 12
    route = Router(sliced(sizes)).route(_state(sizes)[1], dict, order_changed=True)
    assert [len(batch.pieces) for batch in route.host] == [1] * 12


def test_a_large_piece_holds_up_nothing_but_itself() -> None:
    sizes = [1000, 3 << 20, 1000]
    plan = sliced(sizes, chunk_bytes=2 << 20)
    tensors, sources = _state(sizes)
    found = batches(plan.gated, sources)
    assert all(len(batch.pieces) == 1 for batch in found if batch.nbytes > BATCH_BYTES_MAX)
    large = [batch for batch in found if any(piece.entry == 1 for piece in batch.pieces)]
    assert len(large) >= 2, "it lies in two chunks"
    address = tensors[1].data_ptr()
    assert [address in batch.released_storages for batch in large] == [False] * (len(large) - 1) + [True]


def test_the_route_is_made_once_until_tensors_move_or_the_order_changes() -> None:
    sizes = [64] * 6
    tensors, sources = _state(sizes)
    asked: list[int] = []
    order: dict[int, int] = {}

    def update_order() -> Mapping[int, int]:
        asked.append(1)
        return order

    router = Router(sliced(sizes))
    first = router.route(sources, update_order, order_changed=False)
    assert router.route(list(sources), update_order, order_changed=False) is first
    assert len(asked) == 1
    assert router.route(sources, update_order, order_changed=True) is first, "asked, and the same"
    order.update({tensors[4].data_ptr(): 0, tensors[2].data_ptr(): 1})
    turned = router.route(sources, update_order, order_changed=True)
    assert _entries(turned.host) == [4, 2, 0, 1, 3, 5]
    (moved,) = tensors_of([64])
    sources[2] = source_of(2, moved)
    again = router.route(sources, update_order, order_changed=False)
    assert again is not turned
    assert moved.data_ptr() in again.storages
    assert moved.data_ptr() in [address for batch in again.host for address in batch.addresses]


def test_a_part_of_a_storage_is_named_by_the_storage() -> None:
    storage = torch.empty(128, dtype=torch.uint8).untyped_storage()
    source = StorageSource(0, storage, 32, 64, storage.data_ptr() + 32, torch.device("cpu"))
    route = Router(sliced([64])).route([source], dict, order_changed=True)
    assert route.storages == {storage.data_ptr()}
    assert route.host[0].addresses == (storage.data_ptr() + 32,)


def test_tensors_on_a_device_do_not_share_batches_with_those_in_host_memory() -> None:
    sizes = [64] * 64
    tensors, sources = _state(sizes)
    for entry in range(1, 64, 2):
        sources[entry] = source_of(entry, tensors[entry], torch.device("meta"))
    route = Router(sliced(sizes)).route(sources, dict, order_changed=True)
    assert _entries(route.host) == list(range(0, 64, 2))
    assert _entries(route.device) == list(range(1, 64, 2))
    assert len(route.device) == 8


@pytest.mark.parametrize("ranks", [1, 3])
def test_slices_cover_each_entry_once(ranks: int) -> None:
    layout = laid_out([5000, 70_000, 0, 1], ranks=ranks, chunk_bytes=4096)
    seen: Counter[tuple[int, int]] = Counter()
    for rank in range(ranks):
        plan = SlicePlan.of(layout, rank, [True, False, True, False])
        assert plan.nbytes == layout.slice_bytes(rank)
        assert {piece.entry for piece in plan.gated} <= {0, 2}
        assert {piece.entry for piece in plan.now} <= {1, 3}
        for piece in (*plan.now, *plan.gated):
            end = piece.entry_offset + piece.nbytes
            seen.update((piece.entry, byte) for byte in range(piece.entry_offset, end))
    assert set(seen.values()) == {1}
    assert len(seen) == 75_001
