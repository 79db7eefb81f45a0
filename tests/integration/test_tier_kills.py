"""A process that writes into a tier is killed at every point of a slot's life; complete steps survive."""

from __future__ import annotations

import multiprocessing
import signal
from pathlib import Path

import pytest

from holdfast.faultpoint import VARIABLE, Point
from tests.support.tier_writer import STEPS, write_steps
from tests.support.tiers import RUN, image, read, save, slice_of
from trainer_side.tiers.medium import load_libpmem
from trainer_side.tiers.open_tiers import open_tier

# The other kinds differ in how bytes get there, which the simulated device shows as well; tests/soak kills those.
KINDS = ["memory", "nvme"]
POINTS = [
    Point.SLOT_RECYCLED,
    Point.SLOT_UNSEALED,
    Point.SLOT_WRITTEN,
    Point.SLOT_SEALED,
    Point.SLOT_FLUSHED,
    Point.SLOT_RECORDED,
    Point.SLOT_COMMITTED,
]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_leaves_what_was_complete(
    kind: str, point: Point, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_kills(kind, point, tmp_path, monkeypatch)


def check_kills(kind: str, point: Point, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill the writer at the first time it comes to the point, at the second, and so on."""
    monkeypatch.delenv("PMEM_IS_PMEM_FORCE", raising=False)
    environment = {}
    if kind == "pm-libpmem":
        if load_libpmem() is None:
            pytest.skip("libpmem.so.1 is not installed (package libpmem1)")
        environment["PMEM_IS_PMEM_FORCE"] = "1"
    number = 1
    while _killed(f"{kind.partition('-')[0]}:{tmp_path / str(number)}", point, number, environment):
        number += 1 + number // 2  # 1, 2, 4, 7, 11 …: the first ones matter most
    assert number > 2, f"{point} is reached once at most"


def _killed(spec: str, point: Point, number: int, environment: dict[str, str]) -> bool:
    """Have it killed at the n-th time; False if it came to its end before."""
    made = image()
    directory = Path(spec.partition(":")[2])
    progress = directory.with_name(f"{directory.name}.progress")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.tier_writer"])
    fault = {VARIABLE: f"rank:0@{point}#{number}=kill"}
    process = context.Process(target=write_steps, args=(spec, progress, 1, environment | fault))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    said = progress.read_text().split("\n")
    complete = max((int(line.split()[1]) for line in said if line.startswith("complete")), default=0)
    sealed = max((int(line.split()[1]) for line in said if line.startswith("sealed")), default=0)

    tier = open_tier(spec, RUN)
    kept = tier.kept_slices()
    steps = [one.seal.step for one in kept]
    assert len(steps) <= 2
    if complete:
        assert complete in steps, f"step {complete} was complete, found are {steps}"
    if sealed:
        assert steps[0] >= sealed, f"step {sealed} was sealed, found are {steps}"
    for one in kept:
        assert read(tier, one) == slice_of(made, 0, 1000 + one.seal.step)
    tier.prepare(made.layout, 0)  # the lock of the dead is none
    save(tier, made, 0, 2, STEPS)
    assert tier.kept_slices()[0].seal.order == (2, STEPS)
    tier.close()
    if process.exitcode == 0:
        assert complete == STEPS
    return process.exitcode != 0
