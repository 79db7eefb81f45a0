"""Local tiers beside a device: slots that serve as the staging area, and slots that cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.late.control import LateMachine
from tests.late.whole_saves import MIRROR, DeviceRank
from tests.unit.trainer_side.tiers.ranks import until


@MIRROR
def test_persistent_memory_is_written_from_a_locked_area(
    mirror: str, tmp_path: Path, late: LateMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapped file on a disk cannot be locked, whatever the disk: its slot is not a staging area."""
    rank = DeviceRank(
        monkeypatch,
        device_bytes_max=mirror,
        store=f"file://{tmp_path}/store",
        tiers=[f"pm:{tmp_path}"],
        on_full="wait",
        copy="inside",  # skips the comparison, whose kernel on the late device uses pageable memory
    )
    (tier,) = rank.checkpointer._tiers.tiers
    for step in range(3):
        weight = rank.model.get_parameter("0.weight").detach().cpu().numpy().tobytes()
        before = late.count("pageable_copies")
        assert rank.save(step)
        rank.update()
        until(lambda: rank.checkpointer._tiers.is_idle)
        # The first save may copy the random factors of the hashes to the device.
        assert late.count("pageable_copies") == before or step == 0
        (kept,) = (one for one in tier.kept_slices() if one.seal.step == step)
        image = memoryview(bytearray(kept.layout.image_bytes))
        tier.read_into(kept, 0, image)
        assert weight in bytes(image)
    rank.checkpointer.close()
