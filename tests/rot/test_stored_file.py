"""A byte of a stored file flips: restore takes the previous step and names both, `verify` names exactly the tensors.

A chunk's CRC covers every byte of the file: zip headers, the pickle, its padding, tensor bytes, descriptors, the
central directory. Therefore every flip must be detected.
"""

from __future__ import annotations

import bisect
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoints.catalog import Catalog
from holdfast.checkpoints.verification import verify_file
from holdfast.errors import DamageError
from holdfast.image.manifest import Manifest
from holdfast.store.posix import PosixStore
from tests.rot.flips import COUNT, Flip, flips
from tests.support.cluster import same
from tests.support.restoring import Ranks, publish
from trainer_side.ranks.peers import LonePeers
from trainer_side.restore.restore import restore
from trainer_side.restore.restore_attempt import Restored, RestoreOptions
from trainer_side.state.per_rank import PerRank
from trainer_side.state.per_rank_blob import encode

OLDER, NEWER = 7, 8


def _tree(seed: int) -> dict[str, Any]:
    """Return tensors smaller and larger than a chunk, tied ones, several dtypes, and plain values."""
    made = torch.Generator().manual_seed(seed)
    weight = torch.randn(40, 64, generator=made)
    blob = torch.frombuffer(
        bytearray(encode({"seed": seed, "draws": list(range(seed))}, name="rng")), dtype=torch.uint8
    )
    return {
        "model": {
            "weight": weight,
            "tied": weight,
            "bias": torch.randn(3, generator=made),
            "half": torch.randn(700, generator=made).to(torch.bfloat16),
            "count": torch.tensor(seed),
        },
        "moment": torch.randn(64, 33, generator=made),
        "rng": [
            torch.nn.functional.pad(blob, (0, 2048 - len(blob))),
            torch.nn.functional.pad(blob, (0, 2048 - len(blob))),
        ],
        "step": seed,
        "name": "x" * seed,
    }


class _Holder:
    """An object of the state that keeps the restored value."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self.tree = tree

    def state_dict(self) -> dict[str, Any]:
        return self.tree

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        self.tree = tree


def _live() -> dict[str, Any]:
    blank = {name: torch.zeros_like(value) for name, value in _tree(1)["model"].items()}
    return {
        "model": _Holder(blank),
        "moment": torch.zeros(64, 33),
        "rng": PerRank(_Holder({})),
        "step": 0,
        "name": "",
    }


def _content(state: dict[str, Any], restored: Restored) -> dict[str, Any]:
    return {
        "model": state["model"].tree,
        "moment": state["moment"],
        "rng": state["rng"].value.tree,
        **restored.values,
    }


def _expected(seed: int) -> dict[str, Any]:
    tree = _tree(seed)
    return {
        "model": tree["model"],
        "moment": tree["moment"],
        "rng": {"seed": seed, "draws": list(range(seed))},
        "step": seed,
        "name": "x" * seed,
    }


class _Run:
    """Two checkpoints on disk; flips go to the newer one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.older = publish(root, OLDER, _tree(OLDER), ranks=2)
        self.newer = publish(root, NEWER, _tree(NEWER), ranks=2)
        self.path = root / self.newer.file
        self.whole = self.path.read_bytes()

    def flip(self, flip: Flip) -> None:
        self.path.write_bytes(flip.applied(self.whole))

    def region(self, offset: int) -> str:
        """Return the kind of a byte in the newer file, from the manifest alone."""
        entries = self.newer.entries
        found = bisect.bisect_right([entry.offset for entry in entries], offset) - 1
        if found < 0:
            return "header"
        entry = entries[found]
        if offset < entry.offset + entry.nbytes:
            folder, _, name = entry.name.rpartition("/")
            return "tensor" if folder.endswith("/data") else name
        return "directory" if found == len(entries) - 1 else "header"

    def tensors_at(self, offset: int) -> set[str]:
        return {
            tensor.path
            for tensor in self.newer.tensors
            if (entry := self.newer.entries[tensor.entry]).offset <= offset < entry.offset + entry.nbytes
        }


@pytest.fixture
def run(tmp_path: Path) -> _Run:
    return _Run(tmp_path / "run")


def test_the_whole_file_is_restored(run: _Run) -> None:
    state = _live()
    restored = restore(state, PosixStore(run.root), LonePeers(), events=None)
    assert restored is not None
    assert (restored.step, restored.skipped) == (NEWER, [])
    assert same(_content(state, restored), _expected(NEWER))


def test_verify_names_exactly_the_tensors_that_were_hit(run: _Run) -> None:
    store = PosixStore(run.root)
    assert verify_file(store, run.newer).ok
    hit: Counter[str] = Counter()
    # Random flips over the whole file, then as many in tensor bytes only.
    tensor_offsets = [
        offset
        for entry in run.newer.entries
        if entry.name.rpartition("/")[0].endswith("/data")
        for offset in range(entry.offset, entry.offset + entry.nbytes)
    ]
    chosen = [*flips("file", len(run.whole))]
    chosen += [Flip(tensor_offsets[flip.offset], flip.mask) for flip in flips("tensors", len(tensor_offsets))]
    for flip in chosen:
        run.flip(flip)
        report = verify_file(store, run.newer, threads=1)
        assert not report.ok, flip
        assert set(report.tensors) == run.tensors_at(flip.offset), flip
        assert any(d.offset <= flip.offset < d.offset + d.nbytes for d in report.damage), (
            flip,
            report.damage,
        )
        hit[run.region(flip.offset)] += 1
    assert hit["tensor"] >= COUNT
    assert {"header", "directory", "data.pkl"} <= set(hit)


def _restore_past(run: _Run, flip: Flip, ranks: int) -> None:
    run.flip(flip)
    states = [_live() for _ in range(ranks)]

    def one(peers: Any) -> Restored | None:
        return restore(
            states[peers.rank], PosixStore(run.root), peers, events=None, options=RestoreOptions(threads=1)
        )

    outcomes = [one(LonePeers())] if ranks == 1 else Ranks(ranks).run(one)
    assert len(outcomes) == ranks
    for state, restored in zip(states, outcomes, strict=True):
        assert restored is not None
        assert restored.step == OLDER, (flip, run.region(flip.offset))
        (reason,) = restored.skipped
        assert f"step {NEWER}" in reason, reason
        assert same(_content(state, restored), _expected(OLDER)), (flip, "not the older state to the bit")


def test_restore_takes_the_step_before_and_names_both(run: _Run, caplog: pytest.LogCaptureFixture) -> None:
    hit: Counter[str] = Counter()
    for flip in flips("restore", len(run.whole)):
        caplog.clear()
        _restore_past(run, flip, 1)
        (said,) = [record.getMessage() for record in caplog.records if "instead" in record.getMessage()]
        assert f"step {NEWER}" in said, said
        assert f"trying step {OLDER}" in said, said
        hit[run.region(flip.offset)] += 1
    assert hit.total() == COUNT
    assert {"header", "directory", "data.pkl", "tensor"} <= set(hit)


def test_every_byte_that_is_no_tensor_is_seen_by_restore(run: _Run) -> None:
    """Head and directory are parsed before their chunks are checked, so damage there could mislead the reader."""
    offsets = [n for n in range(len(run.whole)) if run.region(n) != "tensor"]
    for flip in flips("structure", len(offsets)):
        _restore_past(run, Flip(offsets[flip.offset], flip.mask), 1)


def test_several_ranks_fall_back_together(run: _Run) -> None:
    for flip in flips("ranks", len(run.whole), 100):
        _restore_past(run, flip, 2)


def test_when_nothing_is_whole_every_checkpoint_is_named(run: _Run) -> None:
    older = run.root / run.older.file
    older.write_bytes(Flip(run.older.entries[0].offset, 1).applied(older.read_bytes()))
    run.flip(Flip(run.newer.entries[0].offset, 1))
    with pytest.raises(DamageError, match=rf"(?s)none of 2.*step {NEWER}.*step {OLDER}"):
        restore(_live(), PosixStore(run.root), LonePeers(), events=None)


def test_the_catalog_still_lists_both(run: _Run) -> None:
    run.flip(Flip(run.newer.entries[0].offset, 1))
    listed = [item.manifest for item in Catalog(PosixStore(run.root)).list()]
    assert listed == [run.newer, run.older]
    assert all(isinstance(manifest, Manifest) for manifest in listed)
