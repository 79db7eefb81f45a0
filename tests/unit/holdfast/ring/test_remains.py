"""The bytes that a ring still holds of checkpoints whose slots are free, and their description on the wire."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import ProtocolError
from holdfast.ring import remains
from holdfast.ring.journal import SlotState
from holdfast.ring.remains import decode_held, encode_held, held_checkpoints
from holdfast.ring.ring import Ring


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    with Ring.create(tmp_path / "run", chunk_bytes=4096, ring_chunks=4, attempt=1) as made:
        yield made


def _fill(ring: Ring, slot: int, step: int, chunk: int) -> None:
    ring.mark_filling(slot, 1, step, chunk)
    ring.mark_full(slot, [(0, 10 * step + chunk), (1, 7)], 100 + chunk)


def _held(ring: Ring) -> dict[tuple[int, int], set[int]]:
    return {(held.attempt, held.step): set(held.chunks) for held in held_checkpoints(ring)}


def test_a_slot_that_is_free_still_has_its_chunk_until_it_is_filled_again(ring: Ring) -> None:
    assert held_checkpoints(ring) == []
    _fill(ring, 0, 5, 0)
    _fill(ring, 1, 5, 1)
    ring.free(0)
    assert _held(ring) == {(1, 5): {0, 1}}
    assert [one.state for one in ring.remains()] == [SlotState.FREE, SlotState.FULL]
    ring.mark_filling(0, 1, 6, 0)
    assert _held(ring) == {(1, 5): {1}}


def test_a_slot_that_is_filled_again_and_given_up_holds_nothing(ring: Ring) -> None:
    _fill(ring, 0, 5, 0)
    ring.free(0)
    ring.mark_filling(0, 1, 6, 0)  # no byte arrives: the slot still holds step 5
    ring.free(0)
    assert held_checkpoints(ring) == []
    assert ring.remains_in(0) is None


def test_a_told_list_is_read_as_it_was(ring: Ring) -> None:
    for slot, step in enumerate((5, 5, 6)):
        _fill(ring, slot, step, slot % 2)
    said = {"divergence": {"message": "rank 1 drifted"}, "ranks": {"0": {"trackers": {"wandb": "run-7"}}}}
    ring.write_checkpoint(1, 6, "staged", "a" * 64, said)
    ring.write_checkpoint(1, 5, "receiving", "b" * 64, {})
    here, there = held_checkpoints(ring), decode_held(encode_held(held_checkpoints(ring)))
    assert [one.drift for one in there] == [one.drift for one in here] == ["rank 1 drifted", ""]
    assert [one.trackers for one in there] == [one.trackers for one in here] == [{"wandb": "run-7"}, {}]
    assert [one[:3] for one in there] == [one[:3] for one in here] == [(1, 6, "a" * 64), (1, 5, "")]
    for one, other in zip(here, there, strict=True):
        for chunk, record in one.chunks.items():
            assert record[2:] == other.chunks[chunk][2:]


@pytest.mark.parametrize(
    "rows",
    [
        "{}",
        "[[1,2]]",
        '[[1,2,"",[[0,5,[["x",3]]]],"",{}]]',
        '[[-1,2,"",[],"",{}]]',
        '[[1,2,"",[],5,{}]]',
        '[[1,2,"",[],"drift",""]]',
        '[[1,2,"",[],"drift",{"wandb":7}]]',
        '[[1,2,"",[]]]',
        '[[1,2,"",[[0,5,[[1,4294967296]]]],"",{}]]',
    ],
)
def test_a_list_of_other_things_is_refused(rows: str) -> None:
    with pytest.raises(ProtocolError, match="the list of the ring's contents"):
        decode_held(zlib.compress(rows.encode()))


def test_a_cut_or_oversized_list_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remains, "_RAW_BYTES_MAX", 5000)
    whole = encode_held([])
    assert decode_held(whole) == []
    for body in (b"", whole[:-1], b"\0" * 20, zlib.compress(b" " * 5000 + b"[]")):
        with pytest.raises(ProtocolError):
            decode_held(body)
