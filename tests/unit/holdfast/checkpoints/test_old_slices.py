"""Slices that an older holdfast left in the store: named, counted for attempts, otherwise left alone."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from holdfast.checkpoints.catalog import Catalog
from holdfast.checkpoints.lease import Lease, newest_attempt
from holdfast.checkpoints.manifest_order import describe_old_slices, old_slices
from holdfast.errors import StoreMissing
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.store.posix import PosixStore
from operator_side.commands.ls import ls
from tests.support.checkpoints import write_torch_run
from trainer_side.ranks.peers import LonePeers
from trainer_side.restore.inventory import StoreListing

NAMES = [
    f"slices/step-{step:09d}-a{attempt:03d}-r{rank:05d}of00002{end}"
    for step, attempt in ((4, 2), (7, 3))
    for rank in range(2)
    for end in (".slice", ".seal.json")
]
STATE = {"x": torch.ones(3)}
TOLD = "this run has 2 steps only as slices written by an older holdfast (the newest: step 7)"


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    made = PosixStore(tmp_path / "run")
    for name in (*NAMES, "slices/layout-a002-" + "ab" * 32 + ".layout", "slices/notes.txt"):
        made.write(name, b"x")
    return made


def test_slices_are_found_by_their_names_newest_first(store: PosixStore) -> None:
    assert old_slices(store.list()) == [CheckpointId(3, 7), CheckpointId(2, 4)]
    told = describe_old_slices("/run", store.list())
    assert TOLD in told
    assert "`assemble` of that version make files of them" in told


def test_a_step_that_has_become_a_file_is_not_named(store: PosixStore, tmp_path: Path) -> None:
    write_torch_run(tmp_path / "run", {7: STATE})
    assert "1 step only as slices written by an older holdfast (the newest: step 4)" in describe_old_slices(
        "/run", store.list()
    )
    write_torch_run(tmp_path / "run", {4: STATE})
    assert describe_old_slices("/run", store.list()) == ""


def test_no_attempt_gets_the_number_of_one_of_them(store: PosixStore) -> None:
    assert newest_attempt(store) == 3
    assert Lease.acquire(store).attempt == 4


def test_commands_name_them_and_call_them_no_checkpoints(store: PosixStore) -> None:
    with pytest.raises(StoreMissing, match="only as slices written by an older holdfast"):
        Catalog(store).get()
    assert Catalog(store).list() == []
    said = CliRunner().invoke(ls, [store.url], catch_exceptions=False)
    assert "the run has no checkpoint yet" in " ".join(said.output.split())
    assert TOLD in " ".join(said.output.split())
    document = json.loads(CliRunner().invoke(ls, [store.url, "--json"], catch_exceptions=False).stdout)
    assert document["checkpoints"] == []
    assert TOLD in document["old_slices"]
    assert len(store.list()) == len(NAMES) + 2, "nothing of them was removed"


def test_a_restore_names_them_once_and_finds_no_checkpoint(
    store: PosixStore, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        store_listing, silent = StoreListing.open(store, LonePeers())
    assert (store_listing.stored, silent) == ([], None)
    assert caplog.text.count(TOLD) == 1
