"""A byte of a manifest flips: readers report damage and the file's name, and restore takes the previous step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.checkpoints.catalog import Catalog
from holdfast.errors import DamageError
from holdfast.image.manifest import Manifest, manifest_name
from holdfast.store.posix import PosixStore
from tests.rot.flips import COUNT, flips
from tests.support.restoring import publish
from trainer_side.ranks.peers import LonePeers
from trainer_side.restore.restore import restore
from trainer_side.restore.restore_attempt import RestoreOptions


def _values(seed: int) -> torch.Tensor:
    return torch.randn(500, generator=torch.Generator().manual_seed(seed))


def test_every_flip_is_damage_and_restore_takes_the_step_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (3, 4):
        manifest = publish(tmp_path, step, {"weight": _values(step), "step": step})
    path = tmp_path / manifest_name(manifest.file)
    whole = path.read_bytes()
    store = PosixStore(tmp_path)
    seen = 0
    for flip in flips("manifest", len(whole)):
        damaged = flip.applied(whole)
        with pytest.raises(DamageError, match=path.name):
            Manifest.from_bytes(damaged, source=path.name)
        path.write_bytes(damaged)
        newest, before = Catalog(store).list()
        assert (newest.name, newest.manifest, newest.state) == (path.name, None, "damaged")
        assert before.state == "verified"
        weight = torch.zeros(500)
        state = {"weight": weight, "step": 0}
        caplog.clear()
        restored = restore(state, store, LonePeers(), events=None, options=RestoreOptions(threads=1))
        assert restored is not None
        assert (restored.step, restored.values) == (3, {"step": 3})
        assert torch.equal(weight, _values(3))
        (reason,) = restored.skipped
        assert path.name in reason, "the one that is not used is not named"
        assert "trying step 3" in caplog.text, "the one that is used is not named"
        seen += 1
    assert seen == COUNT


def test_every_cut_is_damage(tmp_path: Path) -> None:
    whole = publish(tmp_path, 4, {"weight": _values(4)}).to_bytes()
    for nbytes in range(len(whole)):
        with pytest.raises(DamageError):
            Manifest.from_bytes(whole[:nbytes], source="cut")


def test_a_manifest_under_another_ones_name_is_not_used(tmp_path: Path) -> None:
    """Instead of its bytes, its place is wrong: after a directory repair, or a copy under a wrong name."""
    for step in (3, 4):
        publish(tmp_path, step, {"weight": _values(step)})
    (tmp_path / "step-000000004.json").write_bytes((tmp_path / "step-000000003.json").read_bytes())
    newest, _ = Catalog(PosixStore(tmp_path)).list()
    assert "renamed or copied" in newest.fault
