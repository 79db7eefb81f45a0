"""Terraform's outputs for moto's EC2: a network and launch templates for one run's machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import boto3

__all__ = ["REGION", "client", "write_outputs"]

REGION = "eu-west-1"


def client(endpoint: str) -> Any:
    """A client of the test's own."""
    session: Any = boto3.session.Session("testing", "testing", region_name=REGION)
    return session.client("ec2", endpoint_url=endpoint)


def write_outputs(file: Path, ec2: Any, run_id: str) -> None:
    """Make the launch templates of the run; write to `file` the outputs that `terraform output -json` would print."""
    subnet = ec2.describe_subnets()["Subnets"][0]
    image = ec2.describe_images()["Images"][0]["ImageId"]
    templates = [
        ec2.create_launch_template(
            LaunchTemplateName=f"{run_id}-{role}",
            LaunchTemplateData={"ImageId": image, "InstanceType": "t3.micro"},
        )["LaunchTemplate"]["LaunchTemplateId"]
        for role in ("train", "stager")
    ]
    values = {
        "region": REGION,
        "availability_zone": subnet["AvailabilityZone"],
        "subnet_id": subnet["SubnetId"],
        "security_group_ids": [],
        "placement_group": None,
        "trainer_launch_template": {"id": templates[0], "version": 1},
        "stager_launch_template": {"id": templates[1], "version": "1"},
        "bucket": "bucket",
        "run_prefix": run_id,
        "store_url": f"s3://bucket/{run_id}",
        "project": "holdfast",
        "run_id": run_id,
        "tags": {"Team": "sea"},
    }
    outputs = {name: {"sensitive": False, "type": "string", "value": value} for name, value in values.items()}
    file.write_text(json.dumps(outputs))
