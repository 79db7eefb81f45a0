"""Three roles with the least sufficient rights: Terraform's rendering is checked by IAM's rules, by AWS's reference,
and by moto's server, on which holdfast's own store works with it.
"""

from __future__ import annotations

import json
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import boto3
import pytest
from botocore.exceptions import ClientError

from holdfast.errors import HoldfastError
from holdfast.store import open_store
from holdfast.store.base import Store
from tests.infra.iam import decide, lacking_resources, statements, unknown_to_aws
from tests.infra.rendered import Rendered
from tests.support.moto_s3 import running_moto

TRAIN = "module.trainers.module.node.aws_iam_role_policy.work"
STAGER = "module.stager.module.node.aws_iam_role_policy.work"
OPERATOR = "module.operator.aws_iam_role_policy.operator"
EC2 = "arn:aws:ec2:eu-central-1:123456789012"
OURS = {"Project": "gpt", "RunId": "one"}


@pytest.fixture(scope="session")
def whole(minimal: dict[str, Rendered]) -> Rendered:
    return minimal["whole"]


# -- what IAM decides ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [TRAIN, STAGER])
def test_a_node_lists_and_reads_its_own_run_only(whole: Rendered, role: str) -> None:
    policy, bucket = whole.policy(role), f"arn:aws:s3:::{whole.outputs['launcher']['bucket']}"
    assert decide(policy, "s3:GetObject", f"{bucket}/gpt/one/checkpoints/step-000000001.pt")
    assert decide(policy, "s3:ListBucket", bucket, s3__prefix="gpt/one/checkpoints/")
    assert not decide(policy, "s3:GetObject", f"{bucket}/gpt/two/checkpoints/step-000000001.pt")
    assert not decide(policy, "s3:GetObject", f"{bucket}/gpt/one-more/step-000000001.pt")
    assert not decide(policy, "s3:ListBucket", bucket, s3__prefix="gpt/")
    assert not decide(policy, "s3:ListBucket", bucket)
    assert not decide(policy, "s3:GetObject", "arn:aws:s3:::another/gpt/one/step-000000001.pt")


@pytest.mark.parametrize(
    "action",
    ["s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:PutObjectAcl", "s3:PutBucketPolicy"],
)
def test_a_trainer_writes_nothing(whole: Rendered, action: str) -> None:
    bucket = f"arn:aws:s3:::{whole.outputs['launcher']['bucket']}"
    for resource in (bucket, f"{bucket}/gpt/one/x"):
        assert not decide(whole.policy(TRAIN), action, resource)


def test_the_stager_writes_its_run_and_not_the_buckets_rules(whole: Rendered) -> None:
    policy, bucket = whole.policy(STAGER), f"arn:aws:s3:::{whole.outputs['launcher']['bucket']}"
    for action in ("PutObject", "DeleteObject", "AbortMultipartUpload", "ListMultipartUploadParts"):
        assert decide(policy, f"s3:{action}", f"{bucket}/gpt/one/checkpoints/x")
        assert not decide(policy, f"s3:{action}", f"{bucket}/gpt/two/checkpoints/x")
    for action in (
        "PutBucketPolicy",
        "PutLifecycleConfiguration",
        "DeleteBucket",
        "PutEncryptionConfiguration",
    ):
        assert not decide(policy, f"s3:{action}", bucket)


@pytest.mark.parametrize("role", [TRAIN, STAGER])
def test_a_node_by_itself_raises_and_ends_nothing(whole: Rendered, role: str) -> None:
    for action in (
        "ec2:RunInstances",
        "ec2:TerminateInstances",
        "ec2:CreateFleet",
        "iam:PassRole",
        "ssm:GetParameter",
    ):
        assert not decide(whole.policy(role), action, f"{EC2}:instance/i-1", **_tags("Resource", OURS))


def test_only_the_stager_may_become_operator(whole: Rendered) -> None:
    operator = whole.outputs["launcher"]["operator_role_arn"]
    assert decide(whole.policy(STAGER), "sts:AssumeRole", operator)
    assert not decide(whole.policy(STAGER), "sts:AssumeRole", "arn:aws:iam::123456789012:role/admin")
    assert not decide(whole.policy(TRAIN), "sts:AssumeRole", operator)


@pytest.mark.parametrize("action", ["ec2:TerminateInstances", "ec2:DeleteFleets"])
def test_the_operator_ends_what_carries_the_runs_tags(whole: Rendered, action: str) -> None:
    policy = whole.policy(OPERATOR)
    resource = f"{EC2}:fleet/fleet-1" if action == "ec2:DeleteFleets" else f"{EC2}:instance/i-1"
    assert decide(policy, action, resource, **_tags("Resource", OURS))
    assert not decide(policy, action, resource, **_tags("Resource", {**OURS, "RunId": "two"}))
    assert not decide(policy, action, resource, **_tags("Resource", {**OURS, "Project": "other"}))
    assert not decide(policy, action, resource)


def test_the_operator_raises_from_our_templates_with_our_tags_and_types(whole: Rendered) -> None:
    policy, instance = whole.policy(OPERATOR), f"{EC2}:instance/*"
    good = {
        **_tags("Request", OURS),
        "ec2__InstanceType": "g6.2xlarge",
        "ec2__LaunchTemplate": f"{EC2}:launch-template/lt-0aaaaaaaaaaaaaaaa",
    }
    assert decide(policy, "ec2:RunInstances", instance, **good)
    for name, value in {
        "ec2__InstanceType": "p5.48xlarge",
        "ec2__LaunchTemplate": f"{EC2}:launch-template/lt-0cccccccccccccccc",
        "aws__RequestTag__RunId": "two",
        "aws__RequestTag__Project": "other",
    }.items():
        assert not decide(policy, "ec2:RunInstances", instance, **{**good, name: value}), name
        without = {key: given for key, given in good.items() if key != name}
        assert not decide(policy, "ec2:RunInstances", instance, **without), name


def test_the_operator_raises_nowhere_else(whole: Rendered) -> None:
    policy = whole.policy(OPERATOR)
    for resource in ("subnet/subnet-foreign", "security-group/sg-foreign", "placement-group/foreign"):
        assert not decide(policy, "ec2:RunInstances", f"{EC2}:{resource}", **_tags("Request", OURS)), resource
    assert decide(policy, "ec2:RunInstances", "arn:aws:ec2:eu-central-1::image/ami-0123456789abcdef0")
    assert not decide(policy, "ec2:RunInstances", "arn:aws:ec2:eu-central-1::image/ami-0fffffffffffffff0")
    assert not decide(policy, "ec2:CreateFleet", f"{EC2}:fleet/*")
    assert decide(policy, "ec2:CreateFleet", f"{EC2}:fleet/*", **_tags("Request", OURS))


def test_the_operator_passes_exactly_two_roles_to_ec2(whole: Rendered) -> None:
    policy, role = whole.policy(OPERATOR), "arn:aws:iam::123456789012:role"
    for name in ("gpt-one-train", "gpt-one-stager"):
        assert decide(policy, "iam:PassRole", f"{role}/{name}", iam__PassedToService="ec2.amazonaws.com")
        assert not decide(
            policy, "iam:PassRole", f"{role}/{name}", iam__PassedToService="lambda.amazonaws.com"
        )
        assert not decide(policy, "iam:PassRole", f"{role}/{name}")
    for name in ("gpt-one-operator", "gpt-one-drill", "admin"):
        assert not decide(policy, "iam:PassRole", f"{role}/{name}", iam__PassedToService="ec2.amazonaws.com")


def test_the_operator_tags_only_what_it_is_creating(whole: Rendered) -> None:
    policy, instance = whole.policy(OPERATOR), f"{EC2}:instance/i-foreign"
    assert decide(policy, "ec2:CreateTags", instance, ec2__CreateAction="RunInstances")
    assert not decide(policy, "ec2:CreateTags", instance, **_tags("Request", OURS))


def test_the_operator_opens_sessions_to_the_runs_nodes_only(whole: Rendered) -> None:
    policy, instance = whole.policy(OPERATOR), f"{EC2}:instance/i-1"
    assert decide(
        policy, "ssm:StartSession", instance, ssm__resourceTag__Project="gpt", ssm__resourceTag__RunId="one"
    )
    assert not decide(policy, "ssm:StartSession", instance, ssm__resourceTag__Project="gpt")
    assert not decide(
        policy, "ssm:SendCommand", instance, ssm__resourceTag__Project="gpt", ssm__resourceTag__RunId="one"
    )


def test_the_bucket_refuses_requests_without_tls(whole: Rendered) -> None:
    policy, bucket = (
        whole.policy("module.storage.aws_s3_bucket_policy.runs"),
        whole.one("module.storage.aws_s3_bucket.runs"),
    )
    allow = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
    both = {"Statement": [*policy["Statement"], allow]}
    assert decide(both, "s3:GetObject", f"{bucket['arn']}/gpt/one/x", aws__SecureTransport="true")
    assert not decide(both, "s3:GetObject", f"{bucket['arn']}/gpt/one/x", aws__SecureTransport="false")
    assert not decide(both, "s3:ListBucket", str(bucket["arn"]), aws__SecureTransport="false")


# -- AWS's reference -----------------------------------------------------------------------------------------


# Deviations of AWS's own examples from its reference.
AS_IN_AWS_EXAMPLES = {
    # Session Manager's minimal policy; bound to an instance, the agent could not register before it knows which it is.
    "ssm:UpdateInstanceInformation can be bound to ['instance', 'managed-instance'], and has Resource *",
    # RunInstances of spot instances is also checked against the spot request.
    f"ec2:RunInstances does not take {EC2}:spot-instances-request/*",
}


def test_every_action_resource_and_condition_exists_in_aws(
    minimal: dict[str, Rendered], efs: Rendered
) -> None:
    found = set()
    for rendered in (minimal["whole"], minimal["with_kms_and_drills"], efs):
        assert len(rendered.policies()) >= 5
        for policy in rendered.policies().values():
            found |= {complaint.partition(": ")[2] for complaint in unknown_to_aws(policy)}
    assert found == AS_IN_AWS_EXAMPLES


def test_the_reference_finds_what_does_not_exist(whole: Rendered) -> None:
    (statement, *_rest) = statements(whole.policy(STAGER))
    assert "no action s3:ListBukket" in str(
        [*unknown_to_aws({"Statement": {**statement, "Action": ["s3:ListBukket"]}})]
    )
    uploads = {**statement, "Action": ["s3:ListBucketMultipartUploads"]}
    assert "no condition key s3:prefix" in str([*unknown_to_aws({"Statement": uploads})])
    assert "does not take" in str([*unknown_to_aws({"Statement": {**statement, "Action": ["s3:GetObject"]}})])


@pytest.mark.parametrize(
    "action", ["ec2:RunInstances", "ec2:CreateFleet", "ec2:TerminateInstances", "iam:PassRole"]
)
def test_the_operator_has_every_resource_that_an_action_demands(whole: Rendered, action: str) -> None:
    assert lacking_resources(whole.policy(OPERATOR), action) == set()


# -- what a server enforces --------------------------------------------------------------------------------------


class Enforced(NamedTuple):
    """A moto server that checks signatures, actions and resources; not conditions."""

    endpoint: str
    bucket: str
    keys: dict[str, tuple[str, str]]

    def client(self, service: str, role: str, *, secret: str | None = None) -> Any:
        key, right = self.keys[role]
        make: Any = boto3.client  # one of hundreds of services, by name
        return make(
            service,
            endpoint_url=self.endpoint,
            region_name="eu-central-1",
            aws_access_key_id=key,
            aws_secret_access_key=secret or right,
        )

    def store(self, role: str, run: str, monkeypatch: pytest.MonkeyPatch) -> Store:
        key, secret = self.keys[role]
        for name, value in {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_DEFAULT_REGION": "eu-central-1",
        }.items():
            monkeypatch.setenv(name, value)
        return open_store(f"s3://{self.bucket}/gpt/{run}/checkpoints")


@pytest.fixture(scope="module")
def enforced(whole: Rendered) -> Iterator[Enforced]:
    bucket = str(whole.outputs["launcher"]["bucket"])
    with running_moto() as endpoint:
        root = Enforced(endpoint, bucket, {"root": ("testing", "testing")})
        location: Any = {"LocationConstraint": "eu-central-1"}
        root.client("s3", "root").create_bucket(Bucket=bucket, CreateBucketConfiguration=location)
        for run in ("one", "two"):
            root.client("s3", "root").put_object(Bucket=bucket, Key=f"gpt/{run}/checkpoints/x", Body=b"x")
        iam, keys = root.client("iam", "root"), {}
        policies = {
            "train": whole.policy(TRAIN),
            "stager": whole.policy(STAGER),
            "operator": whole.policy(OPERATOR),
        }
        for role, policy in policies.items():
            iam.create_user(UserName=role)
            iam.put_user_policy(UserName=role, PolicyName="p", PolicyDocument=json.dumps(policy))
            key = iam.create_access_key(UserName=role)["AccessKey"]
            keys[role] = (key["AccessKeyId"], key["SecretAccessKey"])
        request = urllib.request.Request(
            f"{endpoint}/moto-api/reset-auth",
            data=b"0",
            method="POST",
            headers={"Content-Type": "text/plain"},
        )
        urllib.request.urlopen(request).close()
        yield Enforced(endpoint, bucket, keys)


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(ClientError) as caught:
        call()
    return str(caught.value.response["Error"]["Code"])


def test_the_server_knows_who_asks(enforced: Enforced) -> None:
    client = enforced.client("s3", "stager", secret="wrong")
    assert refused(lambda: client.list_objects_v2(Bucket=enforced.bucket)) == "SignatureDoesNotMatch"


def test_holdfasts_store_does_all_its_work_under_the_stagers_policy(
    enforced: Enforced, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = enforced.store("stager", "one", monkeypatch)
    store.check(write=True)
    data = bytes(5 << 20) + b"tail"
    for name, publish in (("step-000000001.pt", True), ("step-000000002.pt", False)):
        upload = store.begin(name, nbytes=len(data), chunk_bytes=5 << 20, write_id=f"write-{name}")
        for index, start in enumerate(range(0, len(data), upload.part_bytes)):
            piece = memoryview(data)[start : start + upload.part_bytes]
            upload.write_part(index, [piece], zlib.crc32(piece))
        if publish:
            upload.publish()
    store.write("step-000000001.json", b"{}")
    assert store.read("step-000000001.json") == b"{}"
    assert {item.name for item in store.list()} >= {"step-000000001.pt", "step-000000001.json"}
    assert any(left.startswith("open multipart upload") for left in store.sweep())
    store.delete("step-000000001.pt")


def test_the_stager_reaches_no_other_run(enforced: Enforced, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HoldfastError):
        enforced.store("stager", "two", monkeypatch).check(write=True)
    client = enforced.client("s3", "stager")
    for call in (client.get_object, client.delete_object, client.create_multipart_upload):
        ask = partial(call, Bucket=enforced.bucket, Key="gpt/two/checkpoints/x")
        assert refused(ask) == "AccessDenied"


def test_a_trainer_restores_and_cannot_write(enforced: Enforced, monkeypatch: pytest.MonkeyPatch) -> None:
    store = enforced.store("train", "one", monkeypatch)
    store.check(write=False)
    assert store.read("x") == b"x"
    with pytest.raises(HoldfastError):
        store.check(write=True)
    client = enforced.client("s3", "train")
    at: dict[str, Any] = {"Bucket": enforced.bucket, "Key": "gpt/one/checkpoints/x"}
    assert refused(lambda: client.put_object(**at, Body=b"y")) == "AccessDenied"
    assert refused(lambda: client.delete_object(**at)) == "AccessDenied"
    assert refused(lambda: client.create_multipart_upload(**at)) == "AccessDenied"
    assert (
        refused(lambda: client.get_object(Bucket=enforced.bucket, Key="gpt/two/checkpoints/x"))
        == "AccessDenied"
    )


@pytest.mark.parametrize("role", ["train", "stager"])
def test_nodes_reach_no_instances_and_no_users(enforced: Enforced, role: str) -> None:
    assert refused(enforced.client("ec2", role).describe_instances) == "AccessDenied"
    assert refused(enforced.client("iam", role).list_users) == "AccessDenied"


def test_the_operator_looks_and_reaches_neither_checkpoints_nor_users(enforced: Enforced) -> None:
    ec2 = enforced.client("ec2", "operator")
    assert ec2.describe_instances()["Reservations"] == []
    assert refused(lambda: ec2.create_security_group(GroupName="g", Description="d")) == "AccessDenied"
    assert refused(lambda: ec2.create_key_pair(KeyName="k")) == "AccessDenied"
    s3 = enforced.client("s3", "operator")
    assert (
        refused(lambda: s3.get_object(Bucket=enforced.bucket, Key="gpt/one/checkpoints/x")) == "AccessDenied"
    )
    assert refused(enforced.client("iam", "operator").list_users) == "AccessDenied"


def _tags(kind: str, tags: dict[str, str]) -> dict[str, str]:
    return {f"aws__{kind}Tag__{name}": value for name, value in tags.items()}
