"""A script that does not restore starts a new run only in an empty store, or with fresh=True."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from holdfast.errors import ConfigError, StoreError
from tests.support.slices import DictTier
from tests.unit.trainer_side.tiered import saved
from trainer_side.save.fresh_run_check import FreshRunCheck
from trainer_side.tiers.tier import Tier


def store(tmp_path: Path, *names: str) -> str:
    for name in names:
        (tmp_path / name).write_text("{}")
    return str(tmp_path)


def refusal(url: str, *, fresh: bool = False, restored: bool = False) -> Exception | None:
    beginning = FreshRunCheck(fresh=fresh, seconds_max=5)
    if restored:
        beginning.mark_restored()
    return beginning.refusal(url, ())


def test_a_run_without_checkpoints_may_begin(tmp_path: Path) -> None:
    assert refusal(store(tmp_path, "step-000000001.pt", "notes.json")) is None
    assert refusal("") is None


def test_a_run_with_checkpoints_is_refused_by_name(tmp_path: Path) -> None:
    url = store(tmp_path, *(f"step-{step:09d}.json" for step in range(5)))
    error = refusal(url)
    assert isinstance(error, ConfigError)
    for words in (url, "5 checkpoints", "step-000000004.json", "restore()", "fresh=True"):
        assert words in str(error)


def test_a_restored_run_goes_on(tmp_path: Path) -> None:
    assert refusal(store(tmp_path, "step-000000001.json"), restored=True) is None


def test_fresh_begins_anew_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    beginning = FreshRunCheck(fresh=True, seconds_max=5)
    with caplog.at_level(logging.WARNING):
        assert beginning.refusal(store(tmp_path, "step-000000001.json"), ()) is None
        assert beginning.refusal(str(tmp_path), ()) is None
    assert [record for record in caplog.messages if "starts a new training" in record] == caplog.messages
    assert len(caplog.messages) == 1


def test_fresh_and_restore_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="leave out one of the two"):
        FreshRunCheck(fresh=True, seconds_max=5).mark_restored()


def test_a_store_that_cannot_be_seen_is_no_new_run(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no directory")
    error = refusal(str(file))
    assert isinstance(error, StoreError)
    assert "cannot be seen" in str(error)
    assert refusal(str(file), fresh=True) is None


def test_each_rank_looks_into_its_own_tiers_and_one_into_the_store(tmp_path: Path) -> None:
    url = store(tmp_path, "step-000000001.json")
    slices = DictTier(name="nvme:/mnt").put(saved(5), 1)

    def asked(*tiers: Tier) -> Exception | None:
        return FreshRunCheck(fresh=False, seconds_max=5).refusal(url, tiers, with_store=False)

    assert asked(DictTier()) is None
    error = asked(DictTier(), slices)
    assert isinstance(error, ConfigError)
    assert "1 checkpoints (nvme:/mnt: dict)" in str(error)
