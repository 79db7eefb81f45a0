"""`holdfast diff` between a bucket and a directory: equal tensors are not downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from holdfast.command import cli
from tests.support.restoring import publish
from tests.support.s3_place import S3Place, plain_client

pytestmark = [pytest.mark.s3]


def test_diff_compares_a_run_in_a_bucket_with_one_in_a_directory(
    moto_s3: S3Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    weight = torch.arange(300_000, dtype=torch.float32)
    publish(here, 3, {"weight": weight, "scale": torch.tensor([1.0, 2.0])})
    publish(there, 3, {"weight": weight, "scale": torch.tensor([1.0, 2.5])})
    client = plain_client()
    for path in there.iterdir():
        client.upload_file(str(path), moto_s3.bucket, f"run/{path.name}")
    # Half of the equal tensor is zeros now: whoever read it would say that it is damaged.
    file = (there / "step-000000003.pt").read_bytes()
    begin = file.index(weight.numpy().tobytes()) + 4096
    client.put_object(
        Bucket=moto_s3.bucket,
        Key="run/step-000000003.pt",
        Body=file[:begin] + bytes(600_000) + file[begin + 600_000 :],
    )
    client.close()
    with pytest.raises(SystemExit) as ended:
        cli.main(["diff", str(here), f"{moto_s3.url()}@3", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert ended.value.code == 1
    assert (document["equal_tensors"], document["unread"]) == (1, 1)
    assert [(one["path"], one["differing"], one["max_abs"]) for one in document["tensors"]] == [
        ("scale", 1, 0.5)
    ]
