"""Slot files on a device that loses power: seeded lives, every cut point of a plain one, and deliberate bugs."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.device import Device, PowerCut
from tests.simulation.mutations import Mutation
from tests.simulation.tier_mutations import TIER_MUTATIONS
from tests.simulation.tiers import World, play

SCHEDULES = int(os.environ.get("SIMULATION_TIER_LIVES", "600"))
FIRST_SEED = int(os.environ.get("SIMULATION_FIRST_SEED", "0"))
MUTATION_SEEDS_MAX = 3000
SECONDS_MAX = 1200


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="holdfast")  # failed flushes and damaged seals, by the thousand


@pytest.mark.timeout(SECONDS_MAX)
def test_no_life_loses_what_was_complete(tmp_path: Path) -> None:
    calls = 0
    for seed in range(FIRST_SEED, FIRST_SEED + SCHEDULES):
        try:
            calls += play(seed, tmp_path / str(seed))
        except AssertionError as error:
            raise AssertionError(f"python -m tests.simulation.tiers --seed {seed}: {error}") from error
    assert calls > SCHEDULES * 10, "the device was hardly used"


@pytest.mark.parametrize("mode", ["blocks", "mapped", "pm"])
def test_every_cut_point_leaves_the_newest_complete_step(mode: str, tmp_path: Path) -> None:
    """Three steps, one after the other; power fails at the first call of the device, at the second, and so on."""
    number = 0
    while _lives_until(number, mode, tmp_path):
        number += 1
    assert number > 3 * 4, "each step writes frames, a seal and its records"


def _lives_until(cut_in: int, mode: str, directory: Path) -> bool:
    """Whether power failed before the three steps were over."""
    cut = False
    for seed in range(6):
        device = Device(mode, random.Random(seed * 1000 + cut_in))
        world = World(device.chance, device, directory / f"{cut_in}-{seed}", slots=2)
        tier = world.open()
        tier.prepare(world.layout, 0)
        device.cut_in = cut_in
        try:
            for step in (1, 2, 3):
                world.save(tier, (1, step))
        except PowerCut:
            cut = True
        tier.close()
        device.power_cut()
        world.look()
        world.last(2)
    return cut


@pytest.mark.slow
@pytest.mark.timeout(SECONDS_MAX + 60)
@pytest.mark.parametrize("mutation", TIER_MUTATIONS.values(), ids=lambda mutation: mutation.name)
def test_the_bug_is_seen(mutation: Mutation) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.simulation.tiers", "--mutation", mutation.name),
            *("--first", "0", "--count", str(MUTATION_SEEDS_MAX), "--stop-at", "1"),
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.stdout, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["failures"], (
        f"{mutation.name} ({mutation.bug}) survives {result['schedules']} seeds: the simulation has a hole"
    )
    seed, failure = result["failures"][0]
    assert "expected once" not in failure, "the mutation no longer fits the source"
    print(f"{mutation.name}: seen after {result['schedules']} seeds, seed {seed}: {failure}")


def test_there_are_enough_of_them() -> None:
    assert len(TIER_MUTATIONS) >= 6
