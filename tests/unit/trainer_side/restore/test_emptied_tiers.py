"""A checkpoint that is no longer complete never makes a job restart at step 0 by itself."""

from __future__ import annotations

import hashlib
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from holdfast.errors import DamageError, StoreError, StoreMissing
from holdfast.image.manifest import manifest_name
from holdfast.store.base import SMALL_BYTES_MAX
from tests.support.restoring import CountingStore
from tests.support.slices import keep
from tests.unit.trainer_side.tiered import assert_step, bring_back, saved
from trainer_side.tiers.open_tiers import open_tier
from trainer_side.tiers.tier import Tier

_NONE_IS_WHOLE = "there are checkpoints, and none is whole"


class _Machines:
    """A machine for each rank, with a tier on its disk."""

    def __init__(self, root: Path, ranks: int = 2) -> None:
        self.root, self.run = root, str(root / "run")
        self.places = [root / f"machine-{rank}" for rank in range(ranks)]
        for place in self.places:
            place.mkdir()

    def tier(self, number: int) -> Tier:
        """As a new process opens it."""
        return open_tier(f"file:{self.places[number]}/tier", self.run)

    def tiers(self) -> list[list[Tier]]:
        return [[self.tier(number)] for number in range(len(self.places))]

    def save(self, *steps: int, complete: bool = True, ranks: Sequence[int] | None = None) -> None:
        """Each rank seals its slices of these steps, and hears that they are complete."""
        for rank in range(len(self.places)) if ranks is None else ranks:
            tier = self.tier(rank)
            for step in steps:
                keep(tier, saved(step, ranks=len(self.places)), rank, complete=complete)
            tier.close()

    def empty(self, number: int) -> None:
        shutil.rmtree(self.places[number] / "tier")

    def bytes_of(self, number: int) -> dict[str, str]:
        """A digest of each file on a machine."""
        return {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(self.places[number].rglob("*"))
            if path.is_file()
        }


@pytest.fixture
def machines(tmp_path: Path) -> _Machines:
    return _Machines(tmp_path)


@pytest.mark.parametrize("emptied", [0, 1])
@pytest.mark.parametrize("store", [True, False], ids=["an empty store", "no store"])
def test_an_emptied_tier_of_two_stops_the_restart(machines: _Machines, emptied: int, store: bool) -> None:
    machines.save(5, 7)
    machines.empty(emptied)
    survivors = machines.bytes_of(1 - emptied)
    assert survivors
    with pytest.raises(DamageError, match=_NONE_IS_WHOLE) as caught:
        bring_back(CountingStore(Path(machines.run)) if store else None, machines.tiers())
    said = str(caught.value)
    assert f"those of ranks {emptied} are missing" in said
    place = f"file:{machines.places[emptied]}/tier"
    assert f"rank {emptied} on host {socket.gethostname()} has no slice of it in {place}" in said
    assert "fresh=True" in said
    assert machines.bytes_of(1 - emptied) == survivors


def test_the_only_step_that_was_complete_counts_too_and_comes_back_with_the_machine(
    machines: _Machines,
) -> None:
    machines.save(5)
    away = machines.root / "away"
    (machines.places[1] / "tier").rename(away)
    with pytest.raises(DamageError, match=_NONE_IS_WHOLE):
        bring_back(None, machines.tiers())
    away.rename(machines.places[1] / "tier")
    assert_step(*bring_back(None, machines.tiers()), 5)


def test_a_newer_step_that_was_never_complete_changes_nothing(machines: _Machines) -> None:
    machines.save(5)
    machines.save(7, complete=False, ranks=[0])
    machines.empty(1)
    with pytest.raises(DamageError, match="none of 2 checkpoints can be used"):
        bring_back(None, machines.tiers())


def test_a_job_that_lacks_the_machine_is_told_so(machines: _Machines) -> None:
    machines.save(5)
    with pytest.raises(DamageError, match="the missing ones were on a machine that is not in this job"):
        bring_back(None, machines.tiers()[:1])


def test_a_step_that_nobody_called_complete_is_no_checkpoint(
    machines: _Machines, caplog: pytest.LogCaptureFixture
) -> None:
    machines.save(5, complete=False, ranks=[0])
    results, targets = bring_back(None, machines.tiers())
    assert results == [None, None]
    assert all(torch.equal(target.x, torch.zeros_like(target.x)) for target in targets)
    assert "the run starts at step 0" in caplog.text


def test_an_older_one_in_the_store_is_taken_and_the_lost_one_is_named(
    machines: _Machines, caplog: pytest.LogCaptureFixture
) -> None:
    store = CountingStore(Path(machines.run))
    saved(3).publish(Path(machines.run))
    machines.save(5)
    machines.empty(1)
    results = assert_step(*bring_back(store, machines.tiers()), 3)
    assert all("rank 1 on host" in result.skipped[0] for result in results)
    assert "rank 1 on host" in caplog.text


@pytest.mark.parametrize("damage", ["cut short", "overwritten", "its seal"])
def test_files_that_cannot_be_read_are_no_new_run(tmp_path: Path, damage: str) -> None:
    machines = _Machines(tmp_path, ranks=1)
    machines.save(5)
    (path,) = machines.places[0].rglob("*.slots")
    content = bytearray(path.read_bytes())
    if damage == "cut short":
        del content[len(content) // 2 :]
    elif damage == "overwritten":
        content[:] = bytes(len(content))
    else:
        at = content.index(b'"frame_crc32s"')
        content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamageError, match=_NONE_IS_WHOLE):
        bring_back(None, machines.tiers())
    assert path.read_bytes() == content


# -- manifests that the store lists and does not give ---------------------------------------------------------------


class _Refusing(CountingStore):
    """A store that lists all files, but refuses to read some."""

    def __init__(self, root: Path, error: StoreError, *names: str) -> None:
        super().__init__(root)
        self.error, self.names = error, names

    def read(self, name: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        if name in self.names:
            raise self.error
        return super().read(name, bytes_max)


_DENIED = StoreError("cannot read it: AccessDenied")
_GONE = StoreMissing("there is no such object")


@pytest.mark.parametrize("error", [_DENIED, _GONE], ids=["denied", "not there"])
def test_a_manifest_that_cannot_be_opened_is_named_before_an_older_step_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: StoreError
) -> None:
    for step in (5, 6):
        saved(step).publish(tmp_path / "run")
    store = _Refusing(tmp_path / "run", error, "step-000000006.json")
    results = assert_step(*bring_back(store, [[], []]), 5)
    named = "step-000000006.json: the store lists it, and it cannot be opened"
    assert all(named in result.skipped[0] for result in results)
    assert f"{named}: {error}; trying" in caplog.text


@pytest.mark.parametrize("error", [_DENIED, _GONE], ids=["denied", "not there"])
def test_where_no_manifest_can_be_opened_restore_fails(tmp_path: Path, error: StoreError) -> None:
    saved(6).publish(tmp_path / "run")
    store = _Refusing(tmp_path / "run", error, "step-000000006.json")
    with pytest.raises(StoreError, match="the store lists it, and it cannot be opened"):
        bring_back(store, [[], []])


@pytest.mark.parametrize("attempt", [1, 2], ids=["its attempt is read", "its name tells the attempt"])
def test_an_error_that_may_pass_takes_no_older_step(tmp_path: Path, attempt: int) -> None:
    manifests = [saved(step, attempt=attempt).publish(tmp_path / "run") for step in (5, 6)]
    busy = StoreError("cannot read it: SlowDown", retriable=True)
    store = _Refusing(tmp_path / "run", busy, manifest_name(manifests[-1].file))
    with pytest.raises(StoreError, match="SlowDown"):
        bring_back(store, [[], []])


def test_a_checkpoint_removed_meanwhile_is_no_matter(tmp_path: Path) -> None:
    for step in (5, 6):
        saved(step).publish(tmp_path / "run")

    class Pruned(CountingStore):
        def read(self, name: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
            if name == "step-000000006.json":
                (tmp_path / "run" / name).unlink(missing_ok=True)
            return super().read(name, bytes_max)

    results = assert_step(*bring_back(Pruned(tmp_path / "run"), [[], []]), 5)
    assert all(result.skipped == [] for result in results)
