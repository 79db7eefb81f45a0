"""Restore while a device hangs: after a part of the time the next source is read, and a message names the device."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.errors import StoreError
from tests.support.restoring import CountingStore, Ranks, ThreadPeers
from tests.support.slices import DictTier
from tests.unit.trainer_side.tiered import assert_step, bring_back, saved
from tests.unit.trainer_side.tiers.ranks import until
from trainer_side.ranks.peers import LonePeers
from trainer_side.restore.inventory import newest_attempt
from trainer_side.tiers.tier import Nearness, SealedSlice, Tier
from trainer_side.tiers.tier_inventory import take_inventory

SECONDS_MAX = 5.0  # the wait for a device is a tenth of it
THREADS = 4
SIZE = 200_000  # elements of a tensor with many frames


class Hanging(DictTier):
    """A source whose reads hang in a system call, like those of a dead disk, and then return noise.

    Attributes:
        asked: Number of reads begun; `back`: number of reads ended.
        kept_hangs: Whether the list of kept steps hangs, too.
        hangs_in: Offsets at which reads hang.
    """

    def __init__(self, nearness: Nearness = Nearness.MEMORY, name: str = "") -> None:
        super().__init__(nearness, name)
        self._out, self._in = os.pipe()
        self.asked = self.back = 0
        self.kept_hangs = False
        self.hangs_in = range(1 << 40)
        self._counting = threading.Lock()

    def kept_slices(self) -> list[SealedSlice]:
        if self.kept_hangs:
            self._hang()
        return super().kept_slices()

    def read_into(self, kept: SealedSlice, offset: int, view: memoryview) -> None:
        if offset not in self.hangs_in:
            super().read_into(kept, offset, view)
            return
        self._hang()
        view[:] = b"\xaa" * view.nbytes

    def _hang(self) -> None:
        with self._counting:
            self.asked += 1
        assert os.read(self._out, 1) == b""
        with self._counting:
            self.back += 1

    def answer(self) -> None:
        """Bring the device back: every read returns, and later ones no longer hang."""
        os.close(self._in)
        until(lambda: self.back == self.asked)
        os.close(self._out)


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(tmp_path / "run")


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    tier = Hanging(name="nvme:/dead")
    yield tier
    if tier.back < tier.asked or not tier.asked:
        tier.answer()


@pytest.mark.parametrize("after", ["tier", "rank", "ring", "store"])
def test_the_next_source_has_it(store: CountingStore, hanging: Hanging, after: str) -> None:
    """The next source: another tier of this rank or of another one, the ring, the store. Late bytes change nothing."""
    made = saved(5)
    hanging.put(made, 0, 1)
    near = DictTier(Nearness.RING if after == "ring" else Nearness.FILE).put(made, 0, 1)
    tiers: list[list[Tier]] = [[hanging], []]
    if after == "store":
        made.publish(Path(store.url))
    else:
        tiers[1 if after == "rank" else 0].append(near)
    results, targets = bring_back(store, tiers, seconds_max=SECONDS_MAX, threads=THREADS)
    for result in assert_step(results, targets, 5):
        (named,) = result.mended
        # On a busy machine any of the threads may be the first to time out.
        assert re.match(
            r"rank 0: nvme:/dead: rank 0's slice of step 5 \(attempt 1\) in dict slot 0: frame \d+ ", named
        )
        assert "no bytes for 0.5 s, 10% of restore_seconds_max = 5 s: the device hangs" in named
        assert "nvme:/dead" not in result.sources
    assert (store.bytes_read > 0) == (after == "store")
    assert hanging.asked <= THREADS, "it was asked again, though it hangs"
    hanging.answer()
    assert_step(results, targets, 5)


def test_a_device_that_comes_back_in_the_middle_changes_nothing(
    store: CountingStore, hanging: Hanging
) -> None:
    """The device hangs after some tensors are read; its late bytes must not reach the tensors."""
    made = saved(5, size=SIZE)
    made.publish(Path(store.url))
    hanging.put(made, 0, 1)
    hanging.hangs_in = range(4096 * 40, 4096 * 60)
    results, targets = bring_back(store, [[hanging], []], size=SIZE, seconds_max=SECONDS_MAX, threads=THREADS)
    for result in assert_step(results, targets, 5):
        assert "the device hangs" in result.mended[0]
    assert results[0] is not None
    assert results[0].sources["nvme:/dead"].nbytes > 0
    hanging.answer()
    assert_step(results, targets, 5)


def test_a_tier_that_hangs_holds_up_the_reading_of_no_other(store: CountingStore, hanging: Hanging) -> None:
    """Every thread of the rank waits for the hanging tier; another tier and an older step are still read."""
    made, older = saved(5), saved(4)
    hanging.put(made, 0).put(older, 0)
    other = DictTier(Nearness.FILE).put(made, 1).put(older, 1, 0)
    results, targets = bring_back(None, [[hanging, other]], seconds_max=SECONDS_MAX, threads=2)
    for result in assert_step(results, targets, 4):
        assert (
            "step 5 (attempt 1): frame 0 of rank 0's slice cannot be read from any tier" in result.skipped[0]
        )
        assert "the device hangs" in result.skipped[0]
    assert hanging.asked <= 2, "the older step has cost another wait"
    hanging.answer()
    assert_step(results, targets, 4)


def test_a_tier_that_does_not_say_what_it_keeps_is_left_out(
    store: CountingStore, hanging: Hanging, caplog: pytest.LogCaptureFixture
) -> None:
    made = saved(5)
    hanging.kept_hangs = True
    tiers: list[list[Tier]] = [[hanging.put(made, 0, 1)], [DictTier().put(made, 0, 1)]]
    results, targets = bring_back(store, tiers, seconds_max=SECONDS_MAX)
    assert_step(results, targets, 5)
    assert (
        "rank 0: nvme:/dead cannot list its slices: nvme:/dead hangs: it has not listed its slices within 0.5 s"
        in caplog.text
    )


def test_a_tier_that_hangs_at_the_start_is_refused_on_every_rank_by_name(hanging: Hanging) -> None:
    """A job that started with a hanging tier would hang at its first save, too."""
    hanging.kept_hangs = True
    tiers: list[list[Tier]] = [[DictTier(name=hanging.name)], [hanging]]
    ranks = Ranks(2)
    _, errors = ranks.outcomes(lambda peers: take_inventory(peers, tiers[peers.rank], seconds_max=0.3))
    said = "nvme:/dead hangs: it has not listed its slices within 0.3 s; look at the kernel's messages about the device"
    assert all(isinstance(error, StoreError) for error in errors)
    assert str(errors[0]).startswith(f"rank 1: {said}")
    assert str(errors[1]).startswith(said)


class HangingStore(CountingStore):
    """A store whose listing hangs, like a mount whose server is gone."""

    def __init__(self, root: Path, tier: Hanging) -> None:
        super().__init__(root)
        self._tier = tier

    def list(self) -> list:  # type: ignore[type-arg]
        self._tier._hang()
        return super().list()


def test_a_store_that_hangs_is_one_that_does_not_answer(
    tmp_path: Path, hanging: Hanging, caplog: pytest.LogCaptureFixture
) -> None:
    store = HangingStore(tmp_path / "run", hanging)
    tiers: list[list[Tier]] = [[DictTier().put(saved(5), rank)] for rank in range(2)]
    said = r"rank 0 waited 0\.3 s for the list of checkpoints; the store hangs"
    with pytest.raises(StoreError, match=rf"(?s){said}.*step 5 \(attempt 1\) whole.*restore_without_store"):
        bring_back(store, tiers, seconds_max=0.6)
    results, targets = bring_back(store, tiers, seconds_max=0.6, without_store=True)
    assert_step(results, targets, 5)
    assert "the store does not answer" in caplog.text


def test_the_newest_attempt_of_a_store_that_hangs(tmp_path: Path, hanging: Hanging) -> None:
    store = HangingStore(tmp_path / "run", hanging)

    def ask(peers: ThreadPeers, *, without_store: bool) -> int:
        return newest_attempt(4, store, peers, without_store=without_store, seconds_max=0.3)

    with pytest.raises(StoreError, match="the store hangs: look at its mount"):
        Ranks(2).run(lambda peers: ask(peers, without_store=False))
    assert Ranks(2).run(lambda peers: ask(peers, without_store=True)) == [4, 4]


def test_a_slow_tier_is_not_taken_for_a_hung_one(store: CountingStore) -> None:
    """A tier whose reads answer in time is used, however long the whole restore takes."""
    made = saved(5)
    results, targets = bring_back(store, [[DictTier().put(made, 0, 1)]], seconds_max=SECONDS_MAX)
    assert torch.equal(targets[0].x, torch.full_like(targets[0].x, 5.0))
    assert assert_step(results, targets, 5)[0].mended == []
    assert newest_attempt(0, None, LonePeers()) == 0
