"""The cost of a save on the late device, in counts: launches, waits, transfers, bytes that are mapped or locked."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.late.control import LateMachine
from tests.late.whole_saves import DeviceRank
from tests.support.calls import calls_here
from tests.unit.trainer_side.tiers.ranks import until

pytestmark = pytest.mark.late("lazy")
WARM_UP = 2  # saves; the first knows nothing about the training yet
SAVES = 6
LAUNCHES_MAX, COPIES_MAX, BATCHES_MAX = 16, 4, 80
UPDATE_LAUNCHES = 20  # of the optimizer, per update of many tensors
SECONDS_MAX = 60
CALLS_PER_TENSOR_MAX = 20  # each tensor has its own dictionary in the optimizer's state

# Name ─► device_bytes_max, and whether a slot of a tier in memory is the staging area.
STRATEGIES: dict[str, tuple[str | None, bool]] = {
    "default": (None, False),
    "area mirror": ("1GiB", False),
    "area part": ("6MiB", False),
    "area gate": ("0", False),
    "slot mirror": ("1GiB", True),
    "slot part": ("6MiB", True),
    "slot gate": ("0", True),
}
EACH = pytest.mark.parametrize("strategy", STRATEGIES)


class Cost(NamedTuple):
    """Counts of one save: of `save()` itself, and of all threads until its bytes are in the area."""

    waits: int
    mapped_bytes: int
    locked_bytes: int
    launches: int
    copies: int
    all_mapped_bytes: int
    all_launches: int
    all_copies: int
    all_waits: int


def _now(late: LateMachine) -> list[int]:
    calls = "cudaLaunchKernel", "cudaMemcpyAsync"
    return [
        late.host_waits(),
        *(late.count(name, of_this_thread=True) for name in ("mapped_bytes", "locked_bytes", *calls)),
        *(late.count(name) for name in ("mapped_bytes", *calls, "host_waits")),
    ]


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A folder in memory: a mapped file on a disk cannot be locked."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


class CountedRank:
    """A rank on the late device, saved by one strategy, with work queued before each save."""

    def __init__(
        self, strategy: str, monkeypatch: pytest.MonkeyPatch, late: LateMachine, folder: Path, **more: Any
    ) -> None:
        limit, in_slot = STRATEGIES[strategy]
        settings: dict[str, Any] = {"device_bytes_max": limit, "in_flight_max": 1}
        if in_slot:
            settings |= {"store": f"file://{folder}/store", "tiers": [f"memory:{folder}"], "tier_slots": 2}
            settings["on_full"] = "wait"
        self._late, self._in_slot = late, in_slot
        self.rank = DeviceRank(monkeypatch, **more, **settings)

    def costs(self) -> list[Cost]:
        """The cost of each save in a row, with a step between saves."""
        return [self._save(step) for step in range(SAVES)]

    def _save(self, step: int) -> Cost:
        rank, late = self.rank, self._late
        rank.note()
        before = _now(late)
        assert rank.checkpointer.save(step)
        saved = _now(late)
        rank.update()
        assert rank.checkpointer._copier._idle.wait(SECONDS_MAX)
        done = _now(late)
        self._land(step)
        own = [after - had for had, after in zip(before[:5], saved[:5], strict=True)]
        return Cost(*own, *(after - had for had, after in zip(before[5:], done[5:], strict=True)))

    def _land(self, step: int) -> None:
        """Check that the bytes are those at `save()`."""
        if not self._in_slot:
            self.rank.land(step)
            return
        tiers = self.rank.checkpointer._tiers
        until(lambda: tiers.is_idle)
        (tier,) = tiers.tiers
        (kept,) = (one for one in tier.kept_slices() if one.seal.step == step)
        image = memoryview(bytearray(kept.layout.image_bytes))
        tier.read_into(kept, 0, image)
        self.rank.compare(image, kept.layout, step)


@EACH
def test_from_the_third_save_on_nothing_is_waited_for_mapped_or_locked_in_it(
    strategy: str, late: LateMachine, monkeypatch: pytest.MonkeyPatch, shared_memory: Path
) -> None:
    counted = CountedRank(strategy, monkeypatch, late, shared_memory)
    costs = counted.costs()
    counted.rank.checkpointer.close()
    steady = costs[WARM_UP:]
    assert [cost.waits for cost in steady] == [0] * len(steady)
    assert [cost.mapped_bytes for cost in steady] == [0] * len(steady)
    assert [cost.locked_bytes for cost in steady] == [0] * len(steady)


def many(count: int, numbers: int) -> tuple[torch.nn.ParameterList, torch.optim.Optimizer]:
    """Parameters of one size, and their optimizer."""
    tensors = torch.nn.ParameterList(torch.zeros(numbers, device="cuda") for _ in range(count))
    for one in tensors:
        one.grad = torch.ones_like(one)
    return tensors, torch.optim.SGD(tensors, lr=0.1)


@pytest.mark.parametrize(
    ("count", "numbers"), [(1_000, 61), (3, 4 << 20)], ids=["1,000 small", "3 of 16 MiB"]
)
@pytest.mark.parametrize("strategy", ["area mirror", "area gate", "slot mirror", "slot gate"])
def test_launches_and_transfers_do_not_grow_with_the_number_of_tensors(
    strategy: str,
    count: int,
    numbers: int,
    late: LateMachine,
    monkeypatch: pytest.MonkeyPatch,
    shared_memory: Path,
) -> None:
    tensors, optimizer = many(count, numbers)
    beside = {"many": tensors, "many_optimizer": optimizer}
    counted = CountedRank(strategy, monkeypatch, late, shared_memory, beside=beside)
    update = counted.rank.update

    def update_all() -> None:
        optimizer.step()
        update()

    monkeypatch.setattr(counted.rank, "update", update_all)
    steady = counted.costs()[WARM_UP + 1 :]
    counted.rank.checkpointer.close()
    is_large = numbers > 1 << 20
    for cost in steady:
        assert (cost.waits, cost.mapped_bytes, cost.locked_bytes) == (0, 0, 0)
        if "mirror" in strategy:
            # Hashes of the frozen tensor, and one launch for each width of elements; large tensors have copies.
            assert cost.launches <= LAUNCHES_MAX
            assert cost.copies <= (count if is_large else 0) + COPIES_MAX
            # One copy for each section of 32 MiB.
            assert cost.all_copies - cost.copies <= 1 + count * numbers * 4 // (32 << 20) + COPIES_MAX
        else:
            assert cost.all_copies <= BATCHES_MAX
            assert cost.all_launches - -(-count // 5000) * UPDATE_LAUNCHES <= BATCHES_MAX


@pytest.mark.parametrize("strategy", ["area mirror", "area gate"])
def test_a_save_runs_next_to_nothing_for_each_tensor_where_replicas_are_compared(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, _ = STRATEGIES[strategy]
    calls: list[int] = []
    for count in (50, 550):
        tensors, optimizer = many(count, 61)
        beside = {"many": tensors, "many_optimizer": optimizer}
        rank = DeviceRank(monkeypatch, ranks=2, beside=beside, device_bytes_max=limit, in_flight_max=1)
        for step in range(WARM_UP + 2):
            made = calls_here(lambda: rank.checkpointer.save(step))  # noqa: B023
            optimizer.step()
            rank.update()
            assert rank.checkpointer._copier._idle.wait(SECONDS_MAX)
            rank.link.bytes_of(step)
            rank.link.stage(step)
        calls.append(made)
        rank.checkpointer.close()
    assert (calls[1] - calls[0]) / 500 <= CALLS_PER_TENSOR_MAX
