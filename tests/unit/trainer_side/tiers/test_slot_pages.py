"""The first save waits only for its own slot; others are made during training, or the reason is reported."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.errors import ConfigError, StoreError
from holdfast.store.posix_errors import free_bytes
from tests.unit.trainer_side.tiers.ranks import laid_out, until
from tests.unit.trainer_side.tiers.test_local_tiers import RUN, Rank
from trainer_side.tiers import slot_files
from trainer_side.tiers.first_touch import can_populate, missing_bytes
from trainer_side.tiers.medium import MappedFile
from trainer_side.tiers.open_tiers import open_tier
from trainer_side.tiers.slot_files import SlotFiles
from trainer_side.tiers.slot_pages import SlotPages

SECONDS = 60
pytestmark = pytest.mark.skipif(not can_populate(), reason="a kernel before 5.14")


class Making:
    """Slots beside training are made when the test lets them; `refused` are told that there is no room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may, self.calls = threading.Event(), list[tuple[int, bool]]()
        self.refused = 0
        make = MappedFile.make

        def held(medium: MappedFile, offset: int, nbytes: int, stopped: Callable[[], bool] | None) -> None:
            self.calls.append((offset, stopped is not None))
            while stopped is not None and not self.may.wait(0.01) and not stopped():
                pass
            if stopped is not None and self.refused:
                self.refused -= 1
                raise OSError(28, "No space left on device")
            make(medium, offset, nbytes, stopped)

        monkeypatch.setattr(MappedFile, "make", held)
        monkeypatch.setattr(slot_files, "_AT_ONCE_BYTES_MAX", 0)


@pytest.fixture
def making(monkeypatch: pytest.MonkeyPatch) -> Iterator[Making]:
    made = Making(monkeypatch)
    yield made
    made.may.set()


def slots(tmpfs: Path) -> Path:
    (path,) = tmpfs.rglob("*.slots")
    return path


def test_the_first_save_is_kept_while_the_second_slot_is_being_made(making: Making, tmpfs: Path) -> None:
    rank = Rank([f"memory:{tmpfs}"])
    first, _ = rank.save(1)
    until(lambda: rank.kept() == [1])
    assert rank.bytes_of(1) == {1}
    assert missing_bytes(slots(tmpfs)) > 0
    until(lambda: [beside for _, beside in making.calls] == [False, True])
    assert first.released.wait(SECONDS)
    assert rank.begin(2) is None, "no wait is allowed"
    making.may.set()
    rank.save(3)  # it waits for its slot
    until(lambda: rank.kept() == [3, 1])
    assert rank.bytes_of(3) == {3}
    assert missing_bytes(slots(tmpfs)) == 0
    rank.local.close(SECONDS)


def test_closing_ends_the_making_and_the_next_process_goes_on_with_it(making: Making, tmpfs: Path) -> None:
    rank = Rank([f"memory:{tmpfs}"])
    rank.save(1)
    until(lambda: rank.kept() == [1])
    rank.local.close(SECONDS)
    assert not [one for one in threading.enumerate() if one.name == "holdfast-slots"]
    assert missing_bytes(slots(tmpfs)) > 0
    making.calls.clear()
    again = Rank([f"memory:{tmpfs}"], attempt=2)
    assert [beside for _, beside in making.calls] == [False], "the slot of its next save is made at once"
    assert missing_bytes(slots(tmpfs)) == 0
    again.save(2)
    until(lambda: again.kept() == [2, 1])
    assert again.bytes_of(1) == {1}
    again.local.close(SECONDS)


def test_a_slot_without_room_is_named_declined_and_tried_again(
    making: Making, tmpfs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    making.refused = 1
    making.may.set()
    rank = Rank([f"memory:{tmpfs}"])
    (tier,) = rank.tiers
    until(lambda: not tier.is_making_slots)
    assert "not all slots are made" in caplog.text
    assert "slot 1: No space left on device" in caplog.text
    rank.save(1)
    until(lambda: rank.kept() == [1])
    with pytest.raises(StoreError, match=r"no room in .*the next save that finds no slot tries again"):
        tier.begin(1, 2)
    assert tier.await_slot(1)
    rank.save(3)
    until(lambda: rank.kept() == [3, 1])
    rank.local.close(SECONDS)


def test_room_that_was_promised_to_another_rank_is_not_free(
    making: Making, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (open_tier(f"memory:{tmpfs}", RUN) for _ in range(2))
    layout = laid_out(2)
    first.prepare(layout, 0)
    needed, missing = slots(tmpfs).stat().st_size, missing_bytes(slots(tmpfs))
    monkeypatch.setattr(SlotFiles, "_free_bytes", lambda _: needed)
    with pytest.raises(ConfigError, match=f"{missing} are promised to other ranks"):
        second.prepare(layout, 1)
    slots(tmpfs)  # the one that failed has left none
    making.may.set()
    assert first.await_slot(1)
    second.prepare(layout, 1)
    first.close()
    second.close()


def test_a_tmpfs_that_fills_up_meanwhile_is_an_error_and_no_bus_error(
    making: Making, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mounted = tmp_path / "small"
    mounted.mkdir()
    size = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(mounted)]
    if subprocess.run(size, check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("may not mount here")
    try:
        rank = Rank([f"memory:{mounted}/tier"])
        free = free_bytes(mounted)
        assert free is not None
        (mounted / "other").write_bytes(bytes(free))
        monkeypatch.setattr(SlotFiles, "_free_bytes", lambda _: None)  # it came just after the look
        making.may.set()
        until(lambda: "No space left on device" in caplog.text)
        rank.save(1)
        until(lambda: rank.kept() == [1])
        assert rank.begin(2, wait_seconds=SECONDS) is None
        rank.local.close(SECONDS)
    finally:
        subprocess.run(["umount", "-l", mounted], check=True)


def test_pages_come_in_order_and_an_error_ends_every_wait() -> None:
    made: list[int] = []
    ends = threading.Event()
    stuck = threading.Event()

    def make(slot: int, _: Callable[[], bool]) -> None:
        if slot == 3:
            assert stuck.wait(SECONDS)
            raise OSError("none left")

    pages = SlotPages(make, [3, 1, 2], what="a tier")
    assert pages.start(made.append, ends.set)
    assert not pages.start(made.append, ends.set), "it is under way"
    assert pages.wait(2)
    assert pages.problem is None
    stuck.set()
    assert not pages.wait(3)
    assert made == [1, 2]
    assert ends.is_set()
    assert "none left" in str(pages.problem)
    pages.stop()
    assert not pages.start(made.append, ends.set)
