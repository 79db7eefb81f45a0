"""The EC2 calls against botocore's own model (Stubber): shapes of requests, and every refusal."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError
from botocore.stub import ANY, Stubber

from holdfast.errors import ConfigError, PeerLost
from operator_side.cluster.ec2 import Ec2
from operator_side.cluster.ladder import Order
from tests.unit.operator_side.cluster.test_raising import FILE

ORDER = Order(("a.large", "b.large"), "subnet-0a", 3, 1)
TAGS = {"Project": "holdfast", "RunId": "run-7"}


@pytest.fixture
def stub() -> Iterator[Any]:
    session: Any = boto3.session.Session(aws_access_key_id="x", aws_secret_access_key="x")
    with Stubber(session.client("ec2", region_name="eu-west-1")) as stubber:
        yield stubber
        stubber.assert_no_pending_responses()


def ec2(stub: Any) -> Ec2:
    return Ec2(FILE, stub.client)


def test_a_fleet_is_all_or_nothing(stub: Any) -> None:
    tags = [{"Key": "Project", "Value": "holdfast"}, {"Key": "RunId", "Value": "run-7"}]
    same = {"SingleInstanceType": True, "SingleAvailabilityZone": True}
    stub.add_response(
        "create_fleet",
        {"FleetId": "fleet-1", "Instances": [{"InstanceIds": ["i-1", "i-2"]}, {"InstanceIds": ["i-3"]}]},
        {
            "ClientToken": "token",
            "Type": "instant",
            "LaunchTemplateConfigs": [
                {
                    "LaunchTemplateSpecification": {"LaunchTemplateId": "lt-0a", "Version": "3"},
                    "Overrides": [
                        {"InstanceType": "a.large", "SubnetId": "subnet-0a"},
                        {"InstanceType": "b.large", "SubnetId": "subnet-0a"},
                    ],
                }
            ],
            "TargetCapacitySpecification": {
                "TotalTargetCapacity": 3,
                "SpotTargetCapacity": 2,
                "OnDemandTargetCapacity": 1,
                "DefaultTargetCapacityType": "spot",
            },
            "TagSpecifications": [
                {"ResourceType": "fleet", "Tags": tags},
                {"ResourceType": "instance", "Tags": tags},
            ],
            "SpotOptions": {
                "AllocationStrategy": "price-capacity-optimized",
                "InstanceInterruptionBehavior": "terminate",
                "MinTargetCapacity": 2,
                "MaxTotalPrice": "1.5000",
                **same,
            },
            "OnDemandOptions": {"AllocationStrategy": "lowest-price", "MinTargetCapacity": 1, **same},
        },
    )
    assert ec2(stub).create_trainers(ORDER, TAGS, "token", 1.5).ids == ("i-1", "i-2", "i-3")


@pytest.mark.parametrize(
    "code", ["InsufficientInstanceCapacity", "MaxSpotInstanceCountExceeded", "VcpuLimitExceeded"]
)
@pytest.mark.parametrize("raised", [True, False], ids=["error", "in the answer"])
def test_refusals_are_answers(stub: Any, code: str, raised: bool) -> None:
    if raised:
        stub.add_client_error("create_fleet", code, "no room")
    else:
        stub.add_response(
            "create_fleet", {"FleetId": "f", "Errors": [{"ErrorCode": code, "ErrorMessage": "no room"}] * 2}
        )
    answer = ec2(stub).create_trainers(ORDER, TAGS, "token", None)
    assert (answer.ids, answer.codes, answer.message) == ((), (code,), "no room")


def test_a_fleet_that_is_short_is_told_with_what_there_is(stub: Any) -> None:
    stub.add_response("create_fleet", {"FleetId": "f", "Instances": [{"InstanceIds": ["i-1"]}]})
    answer = ec2(stub).create_trainers(ORDER, TAGS, "token", None)
    assert answer.ids == ("i-1",)
    assert answer.codes == ("InsufficientInstanceCapacity",)


@pytest.mark.parametrize(
    ("code", "status", "error", "words"),
    [
        ("AuthFailure", 401, ConfigError, "credentials"),
        ("RequestExpired", 400, ConfigError, "this machine's clock"),
        ("UnauthorizedOperation", 403, ConfigError, "operator's role"),
        ("OptInRequired", 401, ConfigError, "region"),
        ("InvalidLaunchTemplateId.NotFound", 400, ConfigError, "terraform apply"),
        ("InvalidAMIID.NotFound", 400, ConfigError, "terraform apply"),
        ("InvalidParameterValue", 400, ConfigError, "InvalidParameterValue"),
        ("IdempotentParameterMismatch", 400, ConfigError, "cluster down"),
        ("RequestLimitExceeded", 503, PeerLost, "later"),
        ("InternalError", 500, PeerLost, "later"),
    ],
)
def test_errors_say_what_to_mend(
    stub: Any, code: str, status: int, error: type[Exception], words: str
) -> None:
    stub.add_client_error("create_fleet", code, "said EC2", http_status_code=status)
    with pytest.raises(error, match=words) as said:
        ec2(stub).create_trainers(ORDER, TAGS, "token", None)
    assert "eu-west-1" in str(said.value)


def test_strange_codes_in_an_answer_are_no_lack_of_capacity(stub: Any) -> None:
    said = [{"ErrorCode": "InvalidParameter", "ErrorMessage": "no such thing"}]
    stub.add_response("create_fleet", {"FleetId": "f", "Errors": said})
    with pytest.raises(ConfigError, match="InvalidParameter: no such thing"):
        ec2(stub).create_trainers(ORDER, TAGS, "token", None)


@pytest.mark.parametrize(
    ("raised", "error", "words"),
    [
        (NoCredentialsError(), ConfigError, "no AWS credentials"),
        (EndpointConnectionError(endpoint_url="https://ec2.xx-nowhere-1"), PeerLost, "check the region"),
        (ClientError({"Error": {"Code": "ExpiredToken"}}, "x"), ConfigError, "wrong or expired"),
    ],
)
def test_errors_before_any_answer_are_translated(
    raised: Exception, error: type[Exception], words: str
) -> None:
    class Client:
        def create_fleet(self, **_: Any) -> None:
            raise raised

    with pytest.raises(error, match=words):
        Ec2(FILE, Client()).create_trainers(ORDER, TAGS, "token", None)


def test_an_image_that_is_gone_is_named(stub: Any) -> None:
    version = {"LaunchTemplateData": {"ImageId": "ami-12345678"}}
    stub.add_response("describe_launch_template_versions", {"LaunchTemplateVersions": [version]})
    stub.add_client_error("describe_images", "InvalidAMIID.NotFound", "gone")
    with pytest.raises(ConfigError, match=r"ami-12345678 .*terraform apply"):
        ec2(stub).check_templates()


def test_nodes_are_read_page_by_page(stub: Any) -> None:
    instance = {
        "InstanceId": "i-1",
        "State": {"Name": "terminated"},
        "InstanceType": "a.large",
        "InstanceLifecycle": "spot",
        "LaunchTime": datetime(2026, 1, 1, tzinfo=UTC),
        "Placement": {"AvailabilityZone": "eu-west-1a"},
        "StateReason": {"Code": "Server.SpotInstanceTermination"},
        "Tags": [{"Key": "Role", "Value": "train"}, {"Key": "Generation", "Value": "7"}],
    }
    filters = [{"Name": "tag:Project", "Values": ["holdfast"]}, {"Name": "tag:RunId", "Values": ["run-7"]}]
    pages = [
        {"Reservations": [{"Instances": [instance]}], "NextToken": "more"},
        {"Reservations": [{"Instances": [instance]}]},
    ]
    stub.add_response("describe_instances", pages[0], {"Filters": filters})
    stub.add_response("describe_instances", pages[1], {"Filters": filters, "NextToken": "more"})
    first, _ = ec2(stub).nodes(TAGS)
    assert (first.role, first.generation, first.is_spot, first.is_live) == ("train", "7", True, False)
    assert first.reason == "Server.SpotInstanceTermination"


def test_the_newest_price_of_each_zone(stub: Any) -> None:
    def price(hour: int, value: str) -> dict[str, Any]:
        at = datetime(2026, 1, 1, hour, tzinfo=UTC)
        return {
            "InstanceType": "a.large",
            "AvailabilityZone": "eu-west-1a",
            "SpotPrice": value,
            "Timestamp": at,
        }

    expected = {"InstanceTypes": ["a.large"], "ProductDescriptions": ["Linux/UNIX"], "StartTime": ANY}
    stub.add_response(
        "describe_spot_price_history",
        {"SpotPriceHistory": [price(3, "0.3"), price(5, "0.5"), price(1, "0.1")]},
        expected,
    )
    assert [*ec2(stub).spot_prices(["a.large"]).values()] == [0.5]


def test_ending_what_is_gone_already_is_no_error(stub: Any) -> None:
    stub.add_client_error("terminate_instances", "InvalidInstanceID.NotFound", "gone")
    ec2(stub).terminate(["i-1"])
    stub.add_client_error("terminate_instances", "InvalidParameterValue", "another")
    with pytest.raises(ConfigError, match="terminate i-1"):
        ec2(stub).terminate(["i-1"])
