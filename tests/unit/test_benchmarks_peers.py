"""Every peer writes the whole state; one that does not is detected, as it would win every table."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks.complete import IncompleteError, require_same
from benchmarks.peers import Peer, make
from benchmarks.peers.flat_state import FlatState, parsed
from benchmarks.workload import Workload

# Those that need no other process of a distributed job; the others are verified in each run of the benchmarks.
_ON_DISK = ("torch.save+fsync", "checkfreq", "mlc-base", "pccheck-like", "gpm-like")
_ALONE = (*_ON_DISK, "gemini-like")
_SECONDS_MAX = 60.0


@dataclass(frozen=True)
class _Here:
    workload: Workload
    folder: Path
    store: str = ""
    rank: int = 0
    ranks: int = 1


@pytest.fixture
def here(tmp_path: Path) -> _Here:
    return _Here(Workload("flat-7-1"), tmp_path / "peers")


def _finish(peer: Peer) -> None:
    deadline = time.monotonic() + _SECONDS_MAX
    peer.before_update()
    while not peer.done():
        assert time.monotonic() < deadline, "the checkpoint was never done"
        time.sleep(0.001)


@pytest.fixture(params=_ALONE)
def peer(request: pytest.FixtureRequest, here: _Here) -> Iterator[Peer]:
    made = make(request.param, here)
    yield made
    made.close()


def _nbytes(workload: Workload) -> int:
    return sum(3 * p.nbytes + 4 for p in workload.model.parameters())  # two moments and a step number


def test_a_peer_writes_the_whole_state(peer: Peer, here: _Here) -> None:
    for step in range(12):  # more than are ever under way at once
        here.workload.make_gradients()
        peer.before_update()
        here.workload.update()
        peer.save(step)
    _finish(peer)
    assert peer.verify() == _nbytes(here.workload)  # the last one, and not a mixture


@pytest.mark.parametrize("peer", _ON_DISK, indirect=True)
def test_a_peer_that_writes_nothing_is_caught(peer: Peer, here: _Here) -> None:
    with pytest.raises((OSError, IncompleteError)):
        peer.verify()  # it was never asked to save
    peer.save(0)
    _finish(peer)
    for path in here.folder.iterdir():
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises((OSError, IncompleteError, EOFError, ValueError, RuntimeError)):
        peer.verify()


@pytest.mark.parametrize("peer", ["gemini-like"], indirect=True)
def test_a_peer_that_keeps_nothing_in_memory_is_caught(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(IncompleteError, match="nothing was saved"):
        peer.verify()
    monkeypatch.setattr(FlatState, "copy_to", lambda *_: None)
    peer.save(0)
    _finish(peer)
    with pytest.raises(IncompleteError, match="nothing was saved"):
        peer.verify()


def test_a_flat_state_that_is_cut_short_is_caught() -> None:
    state = FlatState({"a": torch.ones(3), "b": 1})
    memory = torch.empty(state.nbytes, dtype=torch.uint8)
    state.copy_to(memory)
    assert parsed(memory.numpy().data, what="x")["b"] == 1
    with pytest.raises(IncompleteError, match="x: a tensor is cut short"):
        parsed(memory[:-1].numpy().data, what="x")


def test_a_peer_that_keeps_an_older_state_is_caught(peer: Peer, here: _Here) -> None:
    peer.save(0)
    _finish(peer)
    peer.verify()
    with torch.no_grad():
        next(here.workload.model.parameters())[-1] += 1
    with pytest.raises(IncompleteError, match="is not the tensor that was saved"):
        peer.verify()


@pytest.mark.parametrize(
    ("got", "message"),
    [
        ({"a": torch.ones(2)}, "/b is missing"),
        ({"a": torch.ones(2), "b": 2}, "/b is 2, and 1 was saved"),
        ({"a": torch.zeros(2), "b": 1}, "/a is not the tensor"),
        ({"a": torch.ones(2), "b": 1, "c": 1}, "/c was never saved"),
    ],
)
def test_a_difference_is_named(got: object, message: str) -> None:
    with pytest.raises(IncompleteError, match=message):
        require_same({"a": torch.ones(2), "b": 1}, got, what="x")


def test_a_state_without_tensors_compares_nothing() -> None:
    with pytest.raises(IncompleteError, match="no tensor at all"):
        require_same({"b": 1}, {"b": 1}, what="x")
