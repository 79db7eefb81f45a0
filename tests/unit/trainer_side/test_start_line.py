from __future__ import annotations

from typing import Any

import pytest

from holdfast.config import TrainerConfig
from trainer_side.start_line import start_line

URL = "s3://bucket/run"


def line(
    every: int | None, *, stagers: int = 1, fresh: bool = False, attempt: int = 1, **settings: Any
) -> str:
    config = TrainerConfig(**{"watch": (), **settings})
    return start_line(config, every=every, store_url=URL, attempt=attempt, stagers=stagers, fresh=fresh)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            line(100, stager="node-0:29411", watch=("aws", "sigterm")),
            (
                "holdfast saves every 100 steps to s3://bucket/run through the stager node-0:29411 (attempt 1); "
                "watches aws, SIGTERM for preemption notices"
            ),
        ),
        (
            line(1, attempt=3, tiers=("memory",)),
            (
                "holdfast saves every step to s3://bucket/run through the stager, and in memory (attempt 3); watches "
                "for no preemption notices"
            ),
        ),
        (
            line(0, stager="own"),
            (
                "holdfast saves where the script calls save(), and not by itself (every=0), to s3://bucket/run "
                "through a stager of this job on rank 0's machine (attempt 1); watches for no preemption notices"
            ),
        ),
        (
            line(3, stagers=2, stager="own-per-node"),
            (
                "holdfast saves every 3 steps to s3://bucket/run through 2 stagers of this job, one on each node "
                "(attempt 1); watches for no preemption notices"
            ),
        ),
        (
            line(5, stagers=0, tiers=("memory", "nvme:/mnt/nvme0")),
            (
                "holdfast saves every 5 steps in memory, nvme:/mnt/nvme0 alone and not to s3://bucket/run (attempt "
                "1); watches for no preemption notices"
            ),
        ),
        (
            line(2, stagers=3),
            (
                "holdfast saves every 2 steps to s3://bucket/run through 3 stagers (attempt 1); watches for no "
                "preemption notices"
            ),
        ),
        (
            line(None, fresh=True),
            (
                "holdfast saves at the interval with the smallest expected loss, for at most 3 % of the time and at "
                "least every 3600 s, to s3://bucket/run through the stager (attempt 1); starts from scratch, because "
                "the script says fresh=True; watches for no preemption notices"
            ),
        ),
    ],
)
def test_start_line_says_how_often_and_where_this_job_saves(said: str, expected: str) -> None:
    assert said == expected
