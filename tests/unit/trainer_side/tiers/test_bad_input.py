"""Invalid files and directories: reported by name, never overwritten, never a crash."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from holdfast.errors import ConfigError, StoreError
from tests.support.tiers import RUN, check, image, save, write
from trainer_side.tiers import slot_files
from trainer_side.tiers.open_tiers import open_tier
from trainer_side.tiers.slot_format import SECTOR_OFFSETS
from trainer_side.tiers.slot_tier import SlotTier
from trainer_side.tiers.tier_directory import RankLock, TierDirectory

_HOLDER = """
import fcntl, os, sys, time
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(fd, fcntl.LOCK_EX)
os.write(fd, b"%d" % os.getpid())
print("locked", flush=True)
time.sleep(600)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "tier"


def opened(directory: Path, run: str = RUN, slots: int = 2) -> SlotTier:
    tier = open_tier(f"file:{directory}", run, slots=slots)
    assert isinstance(tier, SlotTier)
    return tier


def filled(directory: Path, run: str = RUN) -> Path:
    """A tier with one step; returns its slot file."""
    tier = opened(directory, run)
    tier.prepare(image().layout, 0)
    save(tier, image(), 0, 1, 1)
    tier.close()
    (path,) = TierDirectory(directory, run).directory.glob("*.slots")
    return path


def changed(path: Path, offset: int, data: bytes) -> bytes:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("offset", "data", "said"),
    [
        (0, b"otherprg", "does not begin with the superblock"),
        (8, b"\7\0\0\0", "version 7, this holdfast reads 1"),
        (20, b"\1", "altered"),
        (SECTOR_OFFSETS[0], b"\0" * 8192, "neither commit sector"),
        (3 * 4096 + 5, b"\0\1\2\3", "layout in the file is altered"),
    ],
)
def test_a_damaged_file_is_named_and_kept_and_a_fresh_one_made_beside_it(
    directory: Path, caplog: pytest.LogCaptureFixture, offset: int, data: bytes, said: str
) -> None:
    path = filled(directory)
    before = changed(path, offset, data)
    tier = opened(directory)
    assert tier.kept_slices() == []
    assert said in caplog.text
    assert str(path) in caplog.text
    caplog.clear()
    tier.prepare(image().layout, 0)
    assert said in caplog.text
    assert "left as it is" in caplog.text
    save(tier, image(), 0, 2, 1)
    save(tier, image(), 0, 2, 2)
    check(tier, image(), (2, 2), (2, 1))
    tier.close()
    assert path.read_bytes() == before
    again = opened(directory)
    again.prepare(image().layout, 0)
    check(again, image(), (2, 2), (2, 1))
    again.close()
    assert len(list(path.parent.glob("*.slots"))) == 2


def test_a_file_that_is_cut_short_is_not_mapped(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = filled(directory)
    os.truncate(path, path.stat().st_size - 4096)
    tier = open_tier(f"memory:{directory}", RUN)
    tier.prepare(image().layout, 0)
    assert "cut short" in caplog.text
    check(tier, image())
    tier.close()


def test_a_damaged_seal_costs_one_slice(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = opened(directory)
    tier.prepare(image().layout, 0)
    for step in (1, 2):
        save(tier, image(), 0, 1, step)
    newest = tier.kept_slices()[0]
    path = Path(newest.place)
    superblock = tier._superblocks[newest.place]
    changed(path, superblock.seal_offset(newest.slot) + 20, b"xx")
    check(tier, image(), (1, 1))
    assert "the seal is not the one that was committed" in caplog.text
    tier.close()
    tier = opened(directory)
    tier.prepare(image().layout, 0)
    save(tier, image(), 0, 2, 1)  # the damaged one goes first
    check(tier, image(), (2, 1), (1, 1))
    tier.close()


def test_a_torn_sector_costs_one_commit(directory: Path) -> None:
    path = filled(directory)
    tier = opened(directory)
    both = [path.read_bytes()[at : at + 4096] for at in SECTOR_OFFSETS]
    counts = max(range(2), key=lambda number: both[number][8:16][::-1])
    changed(path, SECTOR_OFFSETS[counts] + 600, b"\xff")
    check(tier, image(), (1, 1))  # the other says so too: only the note that it is complete is gone


def test_a_file_of_another_run_is_refused_and_kept(directory: Path) -> None:
    theirs = filled(directory, "/mnt/store/other/run")
    ours = filled(directory)
    shutil.copyfile(theirs, ours)
    before = ours.read_bytes()
    tier = opened(directory)
    with pytest.raises(ConfigError) as caught:
        tier.prepare(image().layout, 0)
    said = (
        "belongs to another run (run), expected kelp. The file is left as it is: move it away, or choose another "
        "directory"
    )
    assert str(caught.value) == f"{ours}: {said}"
    assert tier.kept_slices() == []
    assert ours.read_bytes() == before


def test_a_file_of_another_rank_is_refused_and_kept(directory: Path) -> None:
    ours = filled(directory)
    tier = opened(directory)
    tier.prepare(image().layout, 1)
    save(tier, image(), 1, 1, 1)
    (theirs,) = ours.parent.glob("rank-00001*.slots")
    tier.close()
    shutil.copyfile(theirs, ours)
    tier = opened(directory)
    with pytest.raises(ConfigError, match="holds slices of rank 1, its name says rank 0"):
        tier.prepare(image().layout, 0)
    assert [kept.seal.rank for kept in tier.kept_slices()] == [1]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give a file away")
@pytest.mark.parametrize("what", ["file", "directory"])
def test_somebody_elses_is_refused(directory: Path, what: str) -> None:
    path = filled(directory)
    os.chown(path if what == "file" else path.parent, 12345, 12345)
    tier = opened(directory)
    said = {
        "file": f"{path}: expected a regular file of uid 0, found uid 12345; remove it",
        "directory": f"local tier {path.parent}: owner 12345, mode 0700; expected owner 0, mode 0700; remove it or "
        "choose another directory",
    }
    with pytest.raises(ConfigError) as caught:
        tier.prepare(image().layout, 0)
    assert said[what] in str(caught.value)
    if what == "file":
        assert tier.kept_slices() == []
    else:
        with pytest.raises(ConfigError, match=r"local tier .*owner 12345"):
            tier.kept_slices()


def test_a_link_is_not_followed(directory: Path, tmp_path: Path) -> None:
    path = filled(directory)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    tier = opened(directory)
    with pytest.raises(ConfigError, match="cannot be opened"):
        tier.prepare(image().layout, 0)
    assert tier.kept_slices() == []


def test_a_directory_that_is_a_link_is_refused(directory: Path, tmp_path: Path) -> None:
    place = filled(directory).parent
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is a link"):
        opened(directory).kept_slices()


def test_a_slot_file_is_private(directory: Path) -> None:
    path = filled(directory)
    assert path.parent.stat().st_mode & 0o077 == 0
    assert path.stat().st_mode & 0o077 == 0


def test_a_directory_on_nothing_is_refused(tmp_path: Path) -> None:
    tier = opened(tmp_path / "not" / "mounted")
    assert tier.kept_slices() == []
    with pytest.raises(ConfigError, match="mount the device"):
        tier.prepare(image().layout, 0)
    assert not (tmp_path / "not").exists()


def test_a_place_that_takes_no_directories_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot make /proc/"):
        opened(Path("/proc/holdfast")).prepare(image().layout, 0)


def test_no_room_says_how_much_is_needed_and_where(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = filled(directory)
    other = image(6)
    monkeypatch.setattr(slot_files, "free_bytes", lambda _: 5000)
    tier = opened(directory)
    with pytest.raises(ConfigError) as caught:
        tier.prepare(other.layout, 0)
    text = str(caught.value)
    assert f"no room in {path.parent}" in text
    assert "rank 0 needs" in text
    assert "5000 are free" in text
    assert f"{path.stat().st_size} bytes in it hold this rank's slices of an earlier layout" in text
    assert not list(path.parent.glob("*.new"))
    monkeypatch.undo()
    tier.prepare(other.layout, 0)  # the failed one has left nothing, no lock either
    tier.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs")
def test_a_full_file_system_is_a_setting_to_mend(tmp_path: Path) -> None:
    mounted = tmp_path / "small"
    mounted.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", mounted], check=False).returncode:
        pytest.skip("may not mount here")
    try:
        tier = open_tier(f"memory:{mounted}/tier", RUN)
        with pytest.raises(ConfigError) as caught:
            tier.prepare(image().layout, 0)
        where = re.escape(str(TierDirectory(mounted / "tier", RUN).directory))
        said = rf"no room in {where} \(.*\): rank 0 needs \d+ bytes for 2 slots of \d+, \d+ are free; make room, choose"
        assert re.search(said, str(caught.value)), caught.value
        tier.close()
    finally:
        subprocess.run(["umount", mounted], check=True)


def test_slots_in_memory_beyond_the_limit_of_this_process_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a control group limits it, a page too much is no error: the kernel kills a rank."""
    monkeypatch.setattr(slot_files, "available_memory_bytes", lambda: 5000)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as mounted:
        tier = open_tier(f"memory:{mounted}", RUN)
        with pytest.raises(ConfigError, match="5000 are free"):
            tier.prepare(image().layout, 0)
        monkeypatch.undo()
        tier.prepare(image().layout, 0)
        tier.close()


def test_a_half_made_slot_file_is_removed(directory: Path) -> None:
    place = TierDirectory(directory, RUN)
    place.make()
    left = place.directory / "rank-00000-01234567.slots.new"
    left.write_bytes(b"half")
    other = place.directory / "rank-00001-01234567.slots.new"
    other.write_bytes(b"somebody is at it")
    path = filled(directory)
    assert not left.exists()
    assert other.exists()
    assert path.exists()


def test_the_lock_of_a_dead_process_is_none_and_that_of_a_living_one_is_named(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_side.tiers.slot_tier._DYING_SECONDS_MAX", 0.1)  # the holder lives
    place = TierDirectory(directory, RUN)
    place.make()
    holder = subprocess.Popen(
        [
            *(sys.executable, "-c", _HOLDER),
            str(place.directory / "rank-00000.lock"),
        ],
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    tier = opened(directory)
    with pytest.raises(ConfigError) as caught:
        tier.prepare(image().layout, 0)
    assert (
        f"process {holder.pid} is writing the slices of rank 0 of run kelp in {place.directory}; end it, or give"
        in str(caught.value)
    )
    holder.kill()
    holder.wait()
    holder.stdout.close()
    tier.prepare(image().layout, 0)
    tier.close()


def test_a_child_does_not_hold_the_lock_of_its_parent(directory: Path) -> None:
    place = TierDirectory(directory, RUN)
    place.make()
    lock = RankLock(place, 0)
    parent, child = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(child[1], b"x")
        os.read(parent[0], 1)
        os._exit(0)
    os.read(child[0], 1)
    with pytest.raises(ConfigError):
        RankLock(place, 0)
    lock.release()
    RankLock(place, 0).release()
    os.write(parent[1], b"x")
    os.waitpid(pid, 0)
    for end in (*parent, *child):
        os.close(end)


def test_ranks_with_a_living_writer_keep_their_files(directory: Path) -> None:
    first, second = opened(directory), opened(directory)
    first.prepare(image(7, ranks=3).layout, 2)
    save(first, image(7, ranks=3), 2, 1, 1)
    second.prepare(image().layout, 0)
    save(second, image(), 0, 2, 1)
    assert len(second.kept_slices()) == 2
    first.close()
    second.close()


def test_a_record_too_large_is_left_out(directory: Path) -> None:
    tier = opened(directory)
    tier.prepare(image().layout, 0)
    assert write(tier, image(), 0, 1, 1).seal({"long": "x" * (1 << 20)})
    (kept,) = tier.kept_slices()
    assert kept.seal.record == {}
    tier.close()


def test_writing_after_the_layout_has_changed_ends_in_its_own_file(directory: Path) -> None:
    tier = opened(directory)
    tier.prepare(image().layout, 0)
    slow = write(tier, image(), 0, 1, 1)
    tier.prepare(image(6).layout, 0)
    assert slow.seal({})
    check(tier, image(), (1, 1))
    with pytest.raises(StoreError, match="over already"):
        slow.seal({})
    tier.close()


def test_another_rank_is_refused_once_it_is_prepared(directory: Path) -> None:
    tier = opened(directory)
    tier.prepare(image().layout, 0)
    with pytest.raises(ConfigError, match="prepared for rank 0, got rank 1"):
        tier.prepare(image().layout, 1)
    tier.close()


def test_more_slots_make_another_file_and_the_old_one_goes_later(directory: Path) -> None:
    filled(directory)
    tier = opened(directory, slots=4)
    tier.prepare(image().layout, 0)
    check(tier, image(), (1, 1))
    save(tier, image(), 0, 2, 1)
    check(tier, image(), (2, 1))
    assert tier.slots == 4
    tier.close()


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="holdfast.trainer")
