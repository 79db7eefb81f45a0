"""The syntax of the setting `tiers`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError
from tests.support.tiers import RUN
from trainer_side.tiers.open_tiers import open_tier
from trainer_side.tiers.slot_tier import SlotTier
from trainer_side.tiers.tier import Nearness
from trainer_side.tiers.tier_directory import TierDirectory


@pytest.mark.parametrize("kind", ["memory", "pm", "nvme", "file"])
def test_a_kind_and_a_directory(kind: str, tmp_path: Path) -> None:
    tier = open_tier(f"{kind}:{tmp_path}", RUN)
    assert (tier.name, tier.nearness) == (f"{kind}:{tmp_path}", Nearness(kind))
    assert list(tmp_path.iterdir()) == []


def test_memory_has_a_directory_of_its_own() -> None:
    tier = open_tier("memory", RUN)
    assert isinstance(tier, SlotTier)
    assert tier._place.base == Path(f"/dev/shm/holdfast-{os.geteuid()}/tiers")


@pytest.mark.parametrize("spec", ["", "tape:/dev/st0", "nvme", "nvme:", "nvme:relative", "Memory", "memory:"])
def test_an_unknown_tier_is_refused_with_what_is_allowed(spec: str) -> None:
    with pytest.raises(ConfigError, match="memory, memory:/dir, pm:/dir, nvme:/dir or file:/dir") as caught:
        open_tier(spec, RUN)
    assert repr(spec) in str(caught.value)


@pytest.mark.parametrize("setting", [{"tier_slots": 1}, {"tier_slots": 65}, {"tier_writers": 0}])
def test_numbers_out_of_range_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        TrainerConfig(**setting)


def test_runs_of_one_name_have_directories_of_their_own(tmp_path: Path) -> None:
    first, second = TierDirectory(tmp_path, "/mnt/a/run"), TierDirectory(tmp_path, "s3://bucket/b/run")
    assert first.directory != second.directory
    assert first.directory == TierDirectory(tmp_path, "file:///mnt/a/run/").directory
    assert first.directory.name.startswith("run-")
    assert second.run == "run"


def test_a_name_with_odd_characters_makes_a_plain_directory(tmp_path: Path) -> None:
    place = TierDirectory(tmp_path, "/mnt/a/Läufe 7;rm")
    assert place.directory.parent == tmp_path
    assert place.directory.name.isascii()
    assert " " not in place.directory.name


@pytest.mark.parametrize(("cores", "writers"), [(1, 1), (2, 1), (8, 4), (16, 6), (96, 6)])
def test_in_memory_as_many_threads_compute_crcs_as_keep_up_with_a_device(
    cores: int, writers: int, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_side.tiers.open_tiers.cores_of_rank", lambda: cores)
    assert open_tier(f"memory:{tmpfs}", "/run").writers == writers
    assert open_tier(f"memory:{tmpfs}", "/run", writers=3).writers == 3
