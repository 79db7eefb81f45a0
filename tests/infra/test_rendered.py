"""Rules for every resource of a kind in the rendered examples, also for resources added later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.infra.rendered import Rendered

LAUNCHER_KEYS = {
    "region": str,
    "availability_zone": str,
    "subnet_id": str,
    "subnets": dict,
    "security_group_ids": list,
    "placement_group": str,
    "trainer_launch_template": dict,
    "trainer_instance_types": list,
    "trainer_profile_arn": str,
    "trainer_ami_id": str,
    "stager_launch_template": dict,
    "stager_instance_type": str,
    "stager_profile_arn": str,
    "stager_ami_id": str,
    "operator_role_arn": str,
    "bucket": str,
    "run_prefix": str,
    "store_url": str,
    "project": str,
    "run_id": str,
    "tags": dict,
}
# AWS does not tag these, or they are parts of a tagged resource.
UNTAGGED = {
    "aws_efs_file_system_policy",
    "aws_efs_mount_target",
    "aws_iam_role_policy",
    "aws_route",
    "aws_route_table_association",
    "aws_s3_bucket_lifecycle_configuration",
    "aws_s3_bucket_ownership_controls",
    "aws_s3_bucket_policy",
    "aws_s3_bucket_public_access_block",
    "aws_s3_bucket_server_side_encryption_configuration",
    "aws_s3_bucket_versioning",
    "aws_vpc_security_group_egress_rule",
    "aws_vpc_security_group_ingress_rule",
}


@pytest.fixture(params=["minimal", "minimal with KMS and drills", "efs"])
def rendered(request: pytest.FixtureRequest, minimal: dict[str, Rendered], efs: Rendered) -> Rendered:
    return {
        "minimal": minimal["whole"],
        "minimal with KMS and drills": minimal["with_kms_and_drills"],
        "efs": efs,
    }[request.param]


def test_ingress_rules_admit_no_addresses(rendered: Rendered) -> None:
    for rule in rendered.of("aws_vpc_security_group_ingress_rule"):
        assert rule.values["referenced_security_group_id"], rule.address
        for source in ("cidr_ipv4", "cidr_ipv6", "prefix_list_id"):
            assert rule.values[source] is None, f"{rule.address}: {source} = {rule.values[source]}"
    for group in rendered.of("aws_security_group"):
        assert group.values["ingress"] == [], (
            f"{group.address}: rules are resources of their own, which the above sees"
        )


def test_traffic_to_the_world_is_https(rendered: Rendered) -> None:
    for rule in rendered.of("aws_vpc_security_group_egress_rule"):
        if rule.values["cidr_ipv4"] is not None or rule.values["prefix_list_id"] is not None:
            assert (rule.values["ip_protocol"], rule.values["from_port"], rule.values["to_port"]) == (
                "tcp",
                443,
                443,
            )
        else:
            assert rule.values["referenced_security_group_id"], rule.address


def test_every_node_is_raised_hardened(rendered: Rendered) -> None:
    templates = rendered.of("aws_launch_template")
    assert len(templates) == 2
    for template in templates:
        (metadata,) = template.values["metadata_options"]
        assert (metadata["http_tokens"], metadata["http_put_response_hop_limit"]) == ("required", 1)
        (disk,) = template.values["block_device_mappings"]
        assert disk["ebs"][0]["encrypted"] == "true"
        assert template.values["instance_initiated_shutdown_behavior"] == "terminate"
        assert template.values["instance_market_options"] == []
        assert template.values["key_name"] is None


def test_every_bucket_is_locked_and_cleans_up(rendered: Rendered) -> None:
    for kind in (
        "aws_s3_bucket_public_access_block",
        "aws_s3_bucket_ownership_controls",
        "aws_s3_bucket_server_side_encryption_configuration",
        "aws_s3_bucket_lifecycle_configuration",
        "aws_s3_bucket_policy",
    ):
        assert len(rendered.of(kind)) == len(rendered.of("aws_s3_bucket")), kind
    for lifecycle in rendered.of("aws_s3_bucket_lifecycle_configuration"):
        aborts = [
            abort["days_after_initiation"]
            for rule in lifecycle.values["rule"]
            if rule["status"] == "Enabled"
            for abort in rule["abort_incomplete_multipart_upload"]
        ]
        assert aborts
        assert min(aborts) >= 2


def test_the_endpoint_of_s3_is_on_every_route_table(rendered: Rendered) -> None:
    (endpoint,) = [
        item for item in rendered.of("aws_vpc_endpoint") if item.values["service_name"].endswith(".s3")
    ]
    assert set(endpoint.values["route_table_ids"]) == {
        item.values["id"] for item in rendered.of("aws_route_table")
    }
    bucket = rendered.outputs["launcher"]["bucket"]
    resources = [
        arn for item in json.loads(endpoint.values["policy"])["Statement"] for arn in item["Resource"]
    ]
    assert {arn.split(":::")[1].split("/")[0] for arn in resources} == {
        bucket,
        "al2023-repos-eu-central-1-de612dc2",
    }


def test_taggable_resources_say_whose_they_are(rendered: Rendered) -> None:
    for item in rendered.resources:
        if item.type not in UNTAGGED:
            tags = item.values["tags"]
            assert (tags["Project"], tags["RunId"], tags["ManagedBy"]) == ("gpt", "one", "terraform"), (
                item.address
            )


def test_roles_are_taken_by_whom_they_are_for(rendered: Rendered) -> None:
    trust = {
        item.address: json.loads(item.values["assume_role_policy"]) for item in rendered.of("aws_iam_role")
    }
    services = {
        "module.trainers.module.node.aws_iam_role.this": {"Service": "ec2.amazonaws.com"},
        "module.stager.module.node.aws_iam_role.this": {"Service": "ec2.amazonaws.com"},
        "module.trainers.aws_iam_role.drill[0]": {"Service": "fis.amazonaws.com"},
    }
    for address, document in trust.items():
        (statement,) = document["Statement"]
        assert statement["Action"] == "sts:AssumeRole"
        if address == "module.operator.aws_iam_role.operator":
            assert all("*" not in arn for arn in statement["Principal"]["AWS"])
        else:
            assert statement["Principal"] == services[address]


def test_an_operator_who_is_named_is_the_only_one_besides_the_stager(minimal: dict[str, Rendered]) -> None:
    role = minimal["with_kms_and_drills"].one("module.operator.aws_iam_role.operator")
    (statement,) = json.loads(role["assume_role_policy"])["Statement"]
    assert statement["Principal"]["AWS"] == [
        "arn:aws:iam::123456789012:user/somebody",
        "arn:aws:iam::123456789012:role/gpt-one-stager",
    ]


def test_the_launcher_is_told_what_it_needs(rendered: Rendered) -> None:
    launcher: dict[str, Any] = rendered.outputs["launcher"]
    assert {key: type(value) for key, value in launcher.items()} == LAUNCHER_KEYS
    for template in ("trainer_launch_template", "stager_launch_template"):
        assert set(launcher[template]) == {"id", "version"}
        assert launcher[template]["version"].isdecimal()
    assert launcher["tags"] == {"Project": "gpt", "RunId": "one", "ManagedBy": "holdfast"}
    assert launcher["subnets"][launcher["availability_zone"]] == launcher["subnet_id"]


def test_the_launcher_reads_what_terraform_puts_out(rendered: Rendered, tmp_path: Path) -> None:
    file = pytest.importorskip("operator_side.cluster.file", reason="the launcher is not here yet")
    path = tmp_path / "terraform-output.json"
    path.write_text(json.dumps(rendered.outputs["launcher"]), encoding="utf-8")
    read = file.ClusterFile.load(path)
    for key in (
        "region",
        "availability_zone",
        "subnet_id",
        "store_url",
        "project",
        "run_id",
    ):
        assert getattr(read, key) == rendered.outputs["launcher"][key]
    assert read.trainer_launch_template.id == "lt-0aaaaaaaaaaaaaaaa"
    assert read.tags == rendered.outputs["launcher"]["tags"]


def test_launch_templates_carry_the_tags_of_the_output(rendered: Rendered) -> None:
    wanted = rendered.outputs["launcher"]["tags"].items()
    for template in rendered.of("aws_launch_template"):
        for specification in template.values["tag_specifications"]:
            assert wanted <= specification["tags"].items(), template.address
