"""A killed `holdfast pull` resumes: received bytes are checked, and not requested again."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.image.manifest import manifest_name
from tests.support.cluster import wait_until
from tests.support.fault_proxy import Fault, FaultProxy, Rule, running_proxy
from tests.support.job import HOLDFAST
from tests.support.restoring import publish
from tests.support.s3_place import S3Place, plain_client

pytestmark = pytest.mark.s3
CHUNK_BYTES = 1 << 20
CAME = 3  # whole chunks, before it was killed


@pytest.fixture(name="proxy")
def _proxy(moto_s3: S3Place) -> Iterator[FaultProxy]:
    with running_proxy(moto_s3.endpoint) as proxy:
        yield proxy


def test_after_sigkill_only_the_rest_is_fetched(tmp_path: Path, moto_s3: S3Place, proxy: FaultProxy) -> None:
    manifest = publish(tmp_path / "run", 3, {"x": torch.randn(3 << 19)}, chunk_bytes=CHUNK_BYTES)
    image = (tmp_path / "run" / manifest.file).read_bytes()
    client = plain_client()
    for name in (manifest.file, manifest_name(manifest.file)):
        body = (tmp_path / "run" / name).read_bytes()
        client.put_object(Bucket=moto_s3.bucket, Key=f"team/run/{name}", Body=body)
    client.close()
    out = tmp_path / "out"
    out.mkdir()
    command = [HOLDFAST, "pull", moto_s3.url("team/run"), str(out), "--json"]
    env = {**os.environ, "AWS_ENDPOINT_URL": proxy.endpoint}

    proxy.add(Rule(Fault.STALL, operation="GetObject", key=".pt", first=CAME + 1, times=None))
    first = subprocess.Popen(command, env=env)
    try:
        wait_until(lambda: bool(proxy.hits(Fault.STALL)), 120, "it never came to the request that hangs")
    finally:
        first.kill()
        first.wait()
    (part,) = out.iterdir()
    assert part.name.startswith(f".{manifest.file}.")
    assert part.stat().st_size == CAME * CHUNK_BYTES
    proxy.clear()

    asked = len(proxy.requests("GetObject", ".pt"))
    again = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["kept_bytes"] == CAME * CHUNK_BYTES
    assert len(proxy.requests("GetObject", ".pt")) - asked == len(manifest.chunk_crc32s) - CAME
    assert [path.name for path in out.iterdir()] == [manifest.file]
    assert (out / manifest.file).read_bytes() == image
