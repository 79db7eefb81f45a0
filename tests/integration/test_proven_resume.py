"""Real jobs are killed and resumed; the first step of each reports whether training continued as before.

first run, killed after step 5 ─┬─► resumed by as many ranks, killed after step 7, a checkpoint
                                │       └─► resumed: not proven, as no step had followed
                                ├─► resumed wrongly
                                └─► resumed by three ranks
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ResumeDiffers
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.proof_record import ProofRecord
from holdfast.ring.directory import runtime_directory
from tests.integration.jobs import proven
from tests.support.cluster import wait_until
from tests.support.forked_job import ForkedJob
from tests.support.job import environment
from tests.support.once import made_once

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]
SECONDS_MAX = 240
STEPS, SAVED = "10", 3
STAGER = ("--chunk-bytes", "64KiB", "--ring-bytes", "4MiB")


class PlayedResume:
    """One job, as it was seen from outside."""

    def __init__(
        self, directory: Path, name: str, store: Path, *arguments: str, ranks: int = 2, **more: str
    ) -> None:
        events, runtime = directory / f"{name}.jsonl", directory / f"{name}-runtime"
        env = environment(runtime, HOLDFAST_EVENTS=str(events), **more)
        stager = ["--store", str(store), *STAGER]
        log = directory / f"{name}.log"
        with ForkedJob(ranks, [proven.__file__, *arguments], stager, env=env, log=log) as job:
            job.wait(SECONDS_MAX)
        ring = runtime_directory(str(store), runtime)
        wait_until(lambda: not ring.exists(), SECONDS_MAX, "the flusher does not end")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def play(directory: Path) -> None:
        store = directory / "store"
        store.mkdir()
        PlayedResume(directory, "first", store, STEPS, "5")
        for other in ("wrong", "three"):
            shutil.copytree(store, directory / f"store-{other}")
        PlayedResume(directory, "again", store, STEPS, "7")
        PlayedResume(directory, "unproven", store, STEPS, "-1", HOLDFAST_ON_UNPROVEN="stop")
        wrong = directory / "store-wrong"
        faults = ("random", "data", "rate")
        PlayedResume(directory, "wrong", wrong, STEPS, "-1", *faults, HOLDFAST_ON_UNPROVEN="stop")
        PlayedResume(directory, "three", directory / "store-three", STEPS, "-1", ranks=3)

    return made_once(tmp_path_factory, "proven", play)


def _proofs(played: Path, name: str, role: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (played / f"{name}.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == "resume_proof" and line["role"] == role]


def _proof(played: Path, name: str) -> tuple[str, str]:
    """The verdict and its sentence, of rank 0 and of the stager, who agree."""
    (said,), (heard,) = _proofs(played, name, "trainer"), _proofs(played, name, "stager")
    assert (said["verdict"], said["text"]) == (heard["verdict"], heard["text"])
    return said["verdict"], said["text"]


def test_a_resume_that_goes_on_as_before_is_verified_on_all_ranks(played: Path) -> None:
    assert _proof(played, "again") == (
        "verified resume",
        "resume verified: data, random numbers, learning rate and loss are those of the run before",
    )
    output = (played / "again.log").read_text()
    assert {f"rank {rank}: verified resume" for rank in (0, 1)} <= set(output.splitlines())


def test_the_first_run_has_resumed_nothing_and_has_left_its_proof_beside_the_checkpoint(played: Path) -> None:
    assert not _proofs(played, "first", "trainer")
    record = ProofRecord.from_bytes((played / f"store-wrong/step-{SAVED:09d}.proof.json").read_bytes())
    assert record.key == CheckpointId(1, SAVED)
    assert [digest["step"] for digest in record.digests] == [SAVED + 1] * 2
    assert record.digests[0]["batch"] != record.digests[1]["batch"]


def test_a_run_that_was_killed_before_the_next_step_proves_nothing_and_is_resumed(played: Path) -> None:
    verdict, text = _proof(played, "unproven")
    assert verdict == "not proven"
    assert "nothing is recorded of the step after step 7 (attempt 2)" in text
    assert (played / "store/step-000000007-a002.pt").exists()
    assert not (played / "store/step-000000007-a002.proof.json").exists()


def test_a_resume_that_differs_is_named_and_ends_the_training_if_asked_to(played: Path) -> None:
    verdict, text = _proof(played, "wrong")
    assert verdict == "differs"
    for named in (
        "data differ on every rank (data ended at epoch 0, sample 40 before, and at epoch 0, sample 48 now)",
        "random numbers differ on every rank (the generator of torch is in another state)",
        "learning rate differs on every rank (that of optimizer was 0.025 before, and is 0.3): is the scheduler in",
        "loss differs on every rank (",
    ):
        assert named in text
    output = (played / "wrong.log").read_text()
    assert f"{ResumeDiffers.__name__}: resume differs from the run before" in output


def test_another_number_of_ranks_is_said_and_compared_by_what_all_share(played: Path) -> None:
    verdict, text = _proof(played, "three")
    assert verdict == "verified resume"
    assert text == (
        "resume verified: the place in the data and learning rate are those of the run before; 3 ranks instead of 2, "
        "so each rank's batches, random numbers and loss cannot be compared"
    )
