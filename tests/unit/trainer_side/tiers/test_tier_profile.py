"""The short profile: the choices, the writes, and the end."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.support.tiers import RUN
from tests.unit.trainer_side.slices import laid_out
from trainer_side.tiers import slot_files
from trainer_side.tiers.medium import Copy
from trainer_side.tiers.open_tiers import open_tier
from trainer_side.tiers.slot_files import SCRATCH_BYTES, TierProfile, choose_profile, measure
from trainer_side.tiers.slot_tier import SlotTier


class _Counting:
    """A medium that only counts."""

    write_mode = "counting"
    copy: Copy | None = None

    def __init__(self) -> None:
        self.written, self.flushes, self.end = 0, 0, 0
        self._guard = threading.Lock()

    def memory(self, offset: int, nbytes: int) -> None: ...

    def write(self, offset: int, view: memoryview) -> None:
        with self._guard:
            self.written += view.nbytes
            self.end = max(self.end, offset + view.nbytes)

    def read(self, offset: int, nbytes: int) -> bytes:
        raise NotImplementedError

    def flush(self) -> None:
        with self._guard:
            self.flushes += 1

    def close(self) -> None: ...


def test_the_least_time_for_a_slice_wins() -> None:
    assert choose_profile(
        {TierProfile(1, 1): 4.0, TierProfile(1, 2): 2.0, TierProfile(1, 4): 2.5}
    ) == TierProfile(1, 2)
    assert choose_profile(
        {TierProfile(1, 2): 2.0, TierProfile(2, 2): 3.0, TierProfile(3, 2): 4.8}
    ) == TierProfile(2, 2)


def test_the_fewest_writers_of_nearly_equal_profiles_win() -> None:
    assert choose_profile(
        {TierProfile(1, 1): 2.0, TierProfile(1, 2): 1.95, TierProfile(1, 4): 1.92}
    ) == TierProfile(1, 1)
    assert choose_profile({TierProfile(1, 4): 2.0, TierProfile(2, 1): 3.9}) == TierProfile(1, 4)


def test_measuring_writes_within_its_file_and_within_its_bounds() -> None:
    medium = _Counting()
    candidates = [TierProfile(count, writers) for count in (1, 2, 3) for writers in (1, 2)]
    assert measure(medium, candidates, clock=iter(range(100)).__next__, seconds_max=100) in candidates
    assert medium.end <= SCRATCH_BYTES
    assert medium.written <= SCRATCH_BYTES * (1 + len(candidates))
    assert medium.flushes == 1 + sum(profile.in_flight for profile in candidates)


def test_measuring_ends_when_its_time_is_over_but_tries_the_first() -> None:
    medium = _Counting()
    candidates = [TierProfile(1, 1), TierProfile(1, 2), TierProfile(1, 4)]
    assert measure(medium, candidates, clock=iter(range(0, 1000, 50)).__next__, seconds_max=1) == TierProfile(
        1, 1
    )
    assert medium.written == 2 * SCRATCH_BYTES


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[list[TierProfile]]:
    calls: list[list[TierProfile]] = []

    def recorded(medium: object, candidates: list[TierProfile]) -> TierProfile:
        calls.append(candidates)
        return candidates[-1]

    monkeypatch.setattr(slot_files, "measure", recorded)
    return calls


def test_writers_set_by_hand_are_not_measured(tmp_path: Path, tried: list[list[TierProfile]]) -> None:
    tier = open_tier(f"file:{tmp_path}", RUN, slots=2, writers=3)
    tier.prepare(laid_out([SCRATCH_BYTES]), 0)
    assert (tier.writers, tried) == (3, [])
    tier.close()


def test_a_small_slice_is_not_measured(tmp_path: Path, tried: list[list[TierProfile]]) -> None:
    tier = open_tier(f"file:{tmp_path}", RUN, slots=2)
    tier.prepare(laid_out([1000]), 0)
    assert (tier.writers, tried) == (1, [])
    tier.close()


def test_the_device_is_measured_once_and_the_file_remembers(
    tmp_path: Path, tried: list[list[TierProfile]]
) -> None:
    for _ in range(2):
        tier = open_tier(f"file:{tmp_path}", RUN, slots=None)
        tier.prepare(laid_out([SCRATCH_BYTES]), 0)
        assert isinstance(tier, SlotTier)
        assert (tier.writers, tier.slots) == (4, 4)
        assert len(tried) == 1
        tier.close()
    (directory,) = tmp_path.iterdir()
    assert sorted(path.suffix for path in directory.iterdir()) == [".lock", ".slots"]


@pytest.mark.parametrize("kind", ["file", "nvme", "pm"])
def test_a_real_device_is_measured(kind: str, tmp_path: Path) -> None:
    tier = open_tier(f"{kind}:{tmp_path}", RUN)
    tier.prepare(laid_out([SCRATCH_BYTES]), 0)
    assert tier.writers in (1, 2, 4)
    assert f"{tier.writers} writer" in tier.write_mode
    tier.close()
