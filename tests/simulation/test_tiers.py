"""Slot files on a device that loses power: seeded lives, and every cut point of a simple life."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path

import pytest

from tests.simulation.device import Device, PowerCut
from tests.simulation.tiers import World, play

SCHEDULES = int(os.environ.get("SIMULATION_TIER_LIVES", "600"))
FIRST_SEED = int(os.environ.get("SIMULATION_FIRST_SEED", "0"))
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
    """Three steps in a row; power fails at the first call of the device, at the second, and so on."""
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
