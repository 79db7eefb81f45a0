"""The doctor explains why a memory tier has small pages, with the command that changes that."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.command.checks import CheckPlan, CheckState
from holdfast.store import file_system
from trainer_side.checks import tiers
from trainer_side.tiers import tier_directory
from trainer_side.tiers.tier_directory import small_pages_reason

REMOUNT = "mount -o remount,huge=within_size /fast"


def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: str, chosen: str | None) -> None:
    mounts, setting = tmp_path / "mounts", tmp_path / "shmem_enabled"
    mounts.write_text(f"/dev/root / ext4 rw 0 0\ntmpfs /fast tmpfs {options} 0 0\n")
    if chosen is not None:
        setting.write_text("always within_size advise never deny force\n".replace(chosen, f"[{chosen}]"))
    monkeypatch.setattr(file_system, "_MOUNTS", mounts)
    monkeypatch.setattr(tier_directory, "_SHMEM_ENABLED", setting)


@pytest.mark.parametrize(
    ("options", "chosen", "command"),
    [
        ("rw,size=1g", "never", REMOUNT),
        ("rw,huge=never", "advise", REMOUNT),
        ("rw,huge=within_size,size=1g", "never", None),
        ("rw,huge=always", "never", None),
        ("rw,huge=advise", "never", None),
        ("rw", "force", None),
        ("rw", None, None),
    ],
)
def test_the_mount_option_decides_unless_the_kernel_forces(
    options: str, chosen: str | None, command: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, tmp_path, options, chosen)
    found = small_pages_reason(Path("/fast/tier"))
    assert (found and found[1]) == command
    assert small_pages_reason(Path("/elsewhere")) is None


def test_a_kernel_that_denies_them_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, tmp_path, "rw,huge=always", "deny")
    found = small_pages_reason(Path("/fast"))
    assert found is not None
    assert "is deny" in found[0]


def test_the_doctor_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, tmp_path, "rw", "never")
    monkeypatch.setenv("HOLDFAST_TIERS", "memory:/fast/tier")
    (_, pages) = tiers(CheckPlan(None, tmp_path, 1, 1, None))
    assert pages.check == "memory tier pages"
    assert pages.state in (CheckState.OK, CheckState.WARN)
    assert REMOUNT in pages.fix
