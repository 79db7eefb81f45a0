"""The tests of infra/ can fail: deliberate errors, one at a time, each found by the test that is there for it."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.infra.toolbox import Terraform


class Mutation(NamedTuple):
    """Words of a file replaced by others, the module whose tests are run, and the run that must fail."""

    file: str
    words: str
    others: str
    module: str
    caught_by: str


MUTATIONS = {
    "open ingress": Mutation(
        "modules/network/main.tf",
        'description                  = "Everything from members"\n'
        '  ip_protocol                  = "-1"\n'
        "  referenced_security_group_id = aws_security_group.cluster.id",
        'description = "Everything"\n  ip_protocol = "-1"\n  cidr_ipv4   = "0.0.0.0/0"',
        "modules/network",
        "nobody_outside_reaches_a_node",
    ),
    "endpoint for any bucket": Mutation(
        "modules/network/main.tf",
        'Resource = ["${var.bucket_arn}/*"]',
        'Resource = ["*"]',
        "modules/network",
        "the_endpoint_leads_to_our_bucket_and_the_packages_only",
    ),
    "a route table without the endpoint": Mutation(
        "modules/network/main.tf",
        "concat([aws_route_table.private.id], aws_route_table.public[*].id)",
        "aws_route_table.public[*].id",
        "modules/network",
        "s3_goes_through_the_endpoint_from_every_route_table",
    ),
    "metadata without tokens": Mutation(
        "modules/node/main.tf",
        '"required"',
        '"optional"',
        "modules/node",
        "metadata_takes_session_tokens_only",
    ),
    "a disk in the clear": Mutation(
        "modules/node/main.tf",
        "encrypted             = true",
        "encrypted             = false",
        "modules/node",
        "disks_are_encrypted_and_go_with_the_node",
    ),
    "spot said by the template": Mutation(
        "modules/node/main.tf",
        "var.spot_in_template ? [true] : []",
        "[true]",
        "modules/node",
        "the_fleet_says_spot_not_the_template",
    ),
    "uploads left for ever": Mutation(
        "modules/storage/main.tf",
        "abort_incomplete_multipart_upload {\n      days_after_initiation = var.abort_multipart_days",
        "expiration {\n      days = 365",
        "modules/storage",
        "unfinished_uploads_are_given_up_but_not_too_soon",
    ),
    "plain HTTP": Mutation(
        "modules/storage/main.tf",
        'Effect    = "Deny"\n        Principal = "*"',
        'Effect    = "Allow"\n        Principal = "*"',
        "modules/storage",
        "the_bucket_takes_tls_only",
    ),
    "a trainer that may write": Mutation(
        "modules/trainers/main.tf",
        'Action   = ["s3:GetObject"]',
        'Action   = ["s3:GetObject", "s3:PutObject"]',
        "modules/trainers",
        "a_trainer_reads_its_run_and_writes_nothing",
    ),
    "slices that may be checkpoints": Mutation(
        "modules/trainers/main.tf",
        '["slices/*", ',
        '["*", ',
        "modules/trainers",
        "slices_are_all_that_a_trainer_may_be_let_write",
    ),
    "slices of every run": Mutation(
        "modules/trainers/main.tf",
        '"${var.bucket_arn}/${local.run_prefix}/checkpoints/${path}"',
        '"${var.bucket_arn}/${var.project}/*/checkpoints/${path}"',
        "modules/trainers",
        "slices_are_all_that_a_trainer_may_be_let_write",
    ),
    "slices written unless asked for": Mutation(
        "modules/trainers/variables.tf",
        'when the stager is lost. Off: what a spot node runs then cannot touch a checkpoint in the bucket at all."\n'
        "  type        = bool\n  default     = false",
        'when the stager is lost."\n  type        = bool\n  default     = true',
        "modules/trainers",
        "a_trainer_reads_its_run_and_writes_nothing",
    ),
    "a trainer that reads every run": Mutation(
        "modules/trainers/main.tf",
        '"${var.bucket_arn}/${local.run_prefix}/*"',
        '"${var.bucket_arn}/*"',
        "modules/trainers",
        "a_trainer_reads_its_run_and_writes_nothing",
    ),
    "a stager that writes every run": Mutation(
        "modules/stager/main.tf",
        '"${var.bucket_arn}/${local.run_prefix}/*"',
        '"${var.bucket_arn}/*"',
        "modules/stager",
        "the_stager_writes_its_run_only",
    ),
    "an operator that ends anything": Mutation(
        "modules/operator/main.tf",
        'Resource  = ["${local.ec2}:instance/*"]\n        Condition = { StringEquals = local.has_our_tags }',
        'Resource  = ["${local.ec2}:instance/*"]\n        Condition = { StringEquals = {} }',
        "modules/operator",
        "it_ends_only_what_carries_the_runs_tags",
    ),
    "an operator that passes any role": Mutation(
        "modules/operator/main.tf",
        "Resource  = var.node_role_arns",
        'Resource  = ["*"]',
        "modules/operator",
        "it_passes_exactly_the_two_node_roles_and_only_to_ec2",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_deliberate_error_is_caught_by_its_test(terraform: Terraform, name: str) -> None:
    mutation = MUTATIONS[name]
    path = terraform.infra / mutation.file
    source = path.read_text(encoding="utf-8")
    assert source.count(mutation.words) == 1, (
        "the words are no longer there once; bring the mutation up to date"
    )
    path.write_text(source.replace(mutation.words, mutation.others), encoding="utf-8")
    failed = _failed(terraform, mutation.module)
    assert failed.get(mutation.caught_by) == "fail", failed


def test_an_argument_that_the_provider_does_not_have_is_found(terraform: Terraform) -> None:
    path = terraform.infra / "modules/network/main.tf"
    source = path.read_text(encoding="utf-8").replace("enable_dns_support ", "enable_dns_suport ")
    path.write_text(source, encoding="utf-8")
    terraform.init("modules/network")
    done = terraform("validate", "-no-color", within="modules/network")
    assert done.returncode == 1
    assert 'An argument named "enable_dns_suport" is not expected here.' in done.stderr


def _failed(terraform: Terraform, module: str) -> dict[str, str]:
    return {
        item["test_run"]["run"]: item["test_run"]["status"]
        for item in terraform.test(module)
        if item["type"] == "test_run" and item["test_run"].get("status") not in (None, "pass", "pending")
    }
