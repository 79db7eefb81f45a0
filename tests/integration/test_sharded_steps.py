"""Updates of models that torch itself splits among ranks (FSDP2, HSDP, tensor parallelism) go on beside the copy.

Training ends as without copies, bit for bit, and no copy is torn. Steps in which the ranks exchange something (Muon,
gradients of SequenceParallel) are taken as one: in pieces, the first would hang, and the second add up wrong sums.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.job import Job, environment

pytestmark = [pytest.mark.mpi]
_JOB = Path(__file__).with_name("jobs") / "sharded_steps.py"  # not imported: torch's own modules for it warn
RANKS = 2
WAYS = (
    "adam",
    "adam-foreach",
    "adam-fused",
    "momentum",
    "momentum-foreach",
    "accumulated",
    "whole-after-forward",
    "bf16",
    "offloaded",
    "hsdp",
    "tensor-parallel",
    "sequence-parallel",
    "fsdp-tp",
    "muon",
)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("sharded")
    with Job(
        RANKS,
        [str(_JOB), str(directory / "out")],
        None,
        env=environment(directory / "runtime"),
        log=directory / "job.log",
    ) as job:
        job.succeed(240)
    return [json.loads((directory / "out" / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("way", WAYS)
def test_the_end_is_the_plain_one_and_no_copy_is_torn(said: list[dict[str, Any]], way: str) -> None:
    for of_rank in said:
        found = of_rank[way]
        assert found["same"]
        assert found["torn"] == 0
        assert found["tensors"] > 20
        assert found["held_back"], "no update came while it was copied: this shows nothing"


def test_no_way_is_left_out(said: list[dict[str, Any]]) -> None:
    assert set(said[0]) == set(WAYS)
