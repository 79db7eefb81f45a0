"""Nightly, more of tests/faults/test_jobs.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.faults.test_jobs import RANKS, STAGER
from tests.integration.jobs import train
from tests.story.test_main_job_s3 import pull_all
from tests.support.cluster import Cluster, check_loadable
from tests.support.fault_proxy import Fault, Rule, running_proxy
from tests.support.s3_place import S3Place, plain_client

pytestmark = pytest.mark.mpi

STEPS, EVERY = 6, 3

SAVED = {2, 5}


@pytest.mark.s3
def test_a_job_on_s3_of_which_a_tenth_of_all_requests_fails(swift_s3: S3Place, tmp_path: Path) -> None:
    with running_proxy(swift_s3.endpoint, seed=3) as proxy:
        kinds = (Fault.RESET_BEFORE, Fault.LOST_ANSWER, Fault.INTERNAL_ERROR, Fault.SLOW_DOWN)
        proxy.add(*(Rule(fault, times=None, probability=0.1 / len(kinds)) for fault in kinds))
        env = {**swift_s3.environment, "AWS_ENDPOINT_URL": proxy.endpoint, "TRAIN_WIDTH": "15000"}
        cluster = Cluster(tmp_path, swift_s3.url("team/run"), env, script=train.__file__, stager=STAGER)
        for steps in (STEPS - EVERY, STEPS):  # the second start restores over the same faulty link
            with cluster.start(RANKS, str(steps), str(EVERY)) as job:
                job.succeed(200)
            cluster.wait_for_flusher()
        assert len(proxy.hits()) >= len(proxy.requests()) // 40
    final = torch.load(cluster.out(2) / "final-0.pt", weights_only=True)
    assert final["start"] == STEPS - EVERY, "the second job did not go on where the first ended"
    check_loadable(pull_all(swift_s3, SAVED, tmp_path / "pulled"))
    client = plain_client()
    try:
        listed = client.list_objects_v2(Bucket=swift_s3.bucket)["Contents"]
        visible = {found["Key"] for found in listed if "/.holdfast/writer-" not in found["Key"]}
        assert visible == {f"team/run/step-{step:09d}.{end}" for step in SAVED for end in ("pt", "json")}
        assert not client.list_multipart_uploads(Bucket=swift_s3.bucket).get("Uploads")
    finally:
        client.close()
