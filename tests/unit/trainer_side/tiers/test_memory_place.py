"""A memory tier on a disk: named without a device, refused with one."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.store.file_system import IN_MEMORY, file_system_of
from tests.support.tiers import RUN, image
from trainer_side.state import accelerator
from trainer_side.tiers.open_tiers import open_tier
from trainer_side.tiers.tier_directory import not_in_memory_reason


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    if file_system_of(tmp_path) in IN_MEMORY:
        pytest.skip(f"{tmp_path} is in memory here")
    return tmp_path


def test_a_directory_in_memory_is_fine(tmpfs: Path) -> None:
    assert not_in_memory_reason("memory", tmpfs / "not" / "there" / "yet") is None


def test_a_link_on_a_disk_that_leads_into_memory_counts_as_memory_and_the_other_way_round(
    tmpfs: Path, disk: Path
) -> None:
    (disk / "link").symlink_to(tmpfs)
    (tmpfs / "link").symlink_to(disk)
    assert not_in_memory_reason("memory", disk / "link") is None
    assert not_in_memory_reason("memory", tmpfs / "link" / "tier") is not None


def test_without_a_device_a_disk_is_named_once_at_the_start(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "holdfast.trainer"):
        tier = open_tier(f"memory:{disk}", RUN)
        tier.prepare(image().layout, 0)
    tier.close()
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith(f"tier memory:{disk}: {disk} is on {file_system_of(disk)}, which is not in memory")
    assert f"file:{disk}" in said


@pytest.mark.parametrize("kind", accelerator.KINDS)
def test_with_a_device_a_disk_is_refused_at_the_start(
    disk: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "kind", lambda: kind)
    with pytest.raises(ConfigError, match=f"{disk} is on .*, which is not in memory.*mount -t tmpfs"):
        open_tier(f"memory:{disk}", RUN)
    for other in ("pm", "nvme", "file"):
        open_tier(f"{other}:{disk}", RUN)


def test_a_device_that_comes_after_the_start_refuses_it_before_the_first_byte(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(f"memory:{disk}", RUN)
    monkeypatch.setattr(accelerator, "kind", lambda: "cuda")
    with pytest.raises(ConfigError, match="is not in memory"):
        tier.prepare(image().layout, 0)
    assert [*disk.iterdir()] == []
