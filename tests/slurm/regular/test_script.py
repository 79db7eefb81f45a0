"""infra/slurm/holdfast.sbatch under a real Slurm, to its end."""

from __future__ import annotations

import pytest

from tests.slurm.story import Story
from tests.support.job import REPOSITORY

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(400)]


def test_the_script_trains_to_its_end(story: Story) -> None:
    script = str(REPOSITORY / "examples" / "train_gpt.py")
    story.submit(trainer=(script, "--steps", "30", "--every", "10", "--width", "64", "--layers", "1"))
    story.check_ended_well(restarts=0, steps=30)
    assert story.check_checkpoints() == {9, 19, 29}
    assert story.launched(1) == ["t1:1", "t2:1"]
