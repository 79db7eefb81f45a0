"""Strategy D on CUDA: layers go from the device straight into the mapping of a local tier, registered once."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from holdfast.crc import crc32
from holdfast.errors import ConfigError
from holdfast.image.slices import area_bytes, frames_of
from holdfast.store.file_system import IN_MEMORY, file_system_of
from tests.gpu.test_staging import PLENTY, OnDevice
from trainer_side.save.host_memory import slot_tensor
from trainer_side.save.staging import Staging
from trainer_side.tiers.open_tiers import open_tier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]


@pytest.mark.parametrize("device_bytes_max", [0, PLENTY], ids=["C", "mirror"])
def test_a_slice_is_copied_from_the_device_into_a_slot_and_sealed(
    device_bytes_max: int | None, tmpfs: Path
) -> None:
    job = OnDevice(device_bytes_max)
    layout = job.skeleton.layout
    tier = open_tier(f"memory:{tmpfs}", "/run", slots=2, writers=1)
    tier.prepare(layout, 0)
    try:
        for step in (1, 2, 3):
            writer = tier.begin(1, step)
            assert writer is not None
            assert writer.memory is not None
            assert writer.copy is not None
            job.staging = Staging(
                job.skeleton, job.slice_plan, job.engine, pinned=True, slot=writer.memory, move=writer.copy
            )
            assert job.staging.memory.is_pinned(), "the mapping is not registered with CUDA"
            job.passed.clear()
            job.copy(job.save())
            job.check()
            for number, frame in enumerate(frames_of(layout, 0)):
                crc = crc32(job.staging.view(frame.offset, frame.nbytes))
                writer.write(number, job.staging.view(frame.offset, frame.padded_bytes), crc)
            assert writer.seal({})
            tier.complete(1, step)
            kept = tier.kept_slices()[0]
            assert kept.seal.step == step
            read = memoryview(bytearray(area_bytes(layout, 0)))
            tier.read_into(kept, 0, read)
            assert bytes(read) == bytes(job.staging.view(0, len(read)))
            job.overwrite()
    finally:
        tier.close()


def test_registered_slot_memory_is_given_back() -> None:
    """If the memory stayed registered, the next mapping at this address could not be registered."""
    memory = torch.zeros(1 << 20, dtype=torch.uint8).numpy().data
    for _ in range(3):
        tensor = slot_tensor(memory, pinned=True)
        assert tensor.is_pinned()
        del tensor
        gc.collect()


def test_a_memory_tier_on_a_disk_is_refused_before_the_first_byte(tmp_path: Path) -> None:
    if file_system_of(tmp_path) in IN_MEMORY:
        pytest.skip(f"{tmp_path} is in memory here")
    torch.zeros(1, device="cuda")
    with pytest.raises(ConfigError, match=f"{tmp_path} is on .*, which is not in memory"):
        open_tier(f"memory:{tmp_path}", "/run")
    assert [*tmp_path.iterdir()] == []
