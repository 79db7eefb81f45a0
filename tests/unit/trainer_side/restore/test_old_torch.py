"""Restore with torch before 2.11, which makes skipped storages too large (`make floor` has such a torch)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.errors import DamageError
from tests.support.restoring import CountingStore, publish
from trainer_side.ranks.peers import LonePeers
from trainer_side.restore import structure
from trainer_side.restore.restore import restore
from trainer_side.restore.restore_attempt import RestoreOptions


def bring_back(state: dict[str, torch.Tensor], root: Path) -> None:
    options = RestoreOptions()
    assert restore(state, CountingStore(root), LonePeers(), events=None, options=options) is not None


def make_larger(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Have `torch.load` make storages as those versions do, for elements of this many bytes."""
    plain = torch.load

    def load(file: Any, map_location: Callable[[Any, str], Any], weights_only: bool) -> Any:
        def larger(storage: Any, location: str) -> Any:
            return map_location(torch.UntypedStorage(storage.nbytes() * times), location)  # type: ignore[no-untyped-call]

        return plain(file, map_location=larger, weights_only=weights_only)

    monkeypatch.setattr(torch, "load", load)
    monkeypatch.setattr(structure, "_skipped_sizes_are_right", lambda: False)


def tree(value: float) -> dict[str, torch.Tensor]:
    whole = torch.full((64,), value)
    return {"a": torch.full((5, 3), value), "none": torch.empty(0), "part": whole[8:16], "b": whole}


def test_a_saved_state_comes_back_under_an_older_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, 3, tree(3.0))
    make_larger(monkeypatch, 4)
    state = tree(0.0)
    bring_back(state, tmp_path)
    assert all(torch.equal(found, tree(3.0)[name]) for name, found in state.items())


def test_a_storage_of_another_size_is_damage_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path, 3, tree(3.0))
    make_larger(monkeypatch, 3)
    with pytest.raises(DamageError, match=r"\d+ bytes in the file, 60 in its manifest"):
        bring_back(tree(0.0), tmp_path)
