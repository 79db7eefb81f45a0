"""The EC2 calls that a cluster needs. Tests override them, so that refusals need no account.

Every call that creates something carries a ClientToken, so repeating it returns the same machines. A refusal for lack
of capacity is an answer (`FleetAnswer.codes`), because the caller can request something else; any other refusal is an
error that says what to fix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from holdfast.errors import ConfigError, PeerLost
from operator_side.cluster.file import ClusterFile, Template
from operator_side.cluster.ladder import CAPACITY, PRICE, SPOT_QUOTA, VCPU_QUOTA, Order

_REFUSALS = CAPACITY | SPOT_QUOTA | VCPU_QUOTA | PRICE
# Pattern of an error code -> what the user must do.
_ADVICE = {
    "AuthFailure|InvalidClientTokenId|SignatureDoesNotMatch|ExpiredToken|RequestExpired": (
        "the credentials are wrong or expired, or this machine's clock is wrong"
    ),
    "UnauthorizedOperation|AccessDenied|AccessDeniedException": (
        "use the operator's role of infra/modules, which has the needed permissions"
    ),
    "OptInRequired": "this region is not enabled for the account; enable it, or use another region",
    ".*LaunchTemplate.*|Invalid(AMIID|SubnetID|Group|PlacementGroup).*": (
        "run `terraform apply`, then `terraform output -json` again"
    ),
    "IdempotentParameterMismatch": "run `holdfast cluster down`, then `holdfast cluster up` again",
}


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster."""

    id: str
    role: str
    state: str  # as in EC2: `pending`, `running`, `shutting-down`, `terminated`, …
    type: str
    address: str
    zone: str
    subnet: str
    is_spot: bool  # otherwise on demand
    launched: datetime
    generation: str
    tags: Mapping[str, str]
    reason: str = ""  # EC2's reason for the state, such as `Server.SpotInstanceTermination`

    @property
    def is_live(self) -> bool:
        """Whether it is running or starting: it costs money, and can be used."""
        return self.state in {"pending", "running"}


@dataclass(frozen=True, slots=True)
class FleetAnswer:
    """The answer to a request: machines, or the error codes of the refusal."""

    ids: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    message: str = ""


class Ec2:
    """Calls EC2. `client`: a boto3 EC2 client; None makes one from the environment."""

    def __init__(self, file: ClusterFile, client: Any = None) -> None:
        self._file = file
        self._client = client if client is not None else _client(file.region)

    def nodes(self, tags: Mapping[str, str]) -> tuple[Node, ...]:
        """Return every machine with all these tags, including terminated ones that EC2 still lists."""
        filters = [{"Name": f"tag:{name}", "Values": [value]} for name, value in tags.items()]
        pages = self._pages("describe_instances", "Reservations", Filters=filters)
        return tuple(_node(instance) for group in pages for instance in group["Instances"])

    def check_templates(self) -> None:
        """Raise `ConfigError` if a launch template, its version, or its image does not exist."""
        for name, template in (
            ("trainer", self._file.trainer_launch_template),
            ("stager", self._file.stager_launch_template),
        ):
            found = self._call(
                "describe_launch_template_versions",
                f"the {name}'s launch template {template.id}, version {template.version}",
                LaunchTemplateId=template.id,
                Versions=[template.version],
            )
            versions = found["LaunchTemplateVersions"]
            image = versions[0]["LaunchTemplateData"].get("ImageId", "") if versions else ""
            if image.startswith("ami-"):  # EC2 itself resolves resolve:ssm:…
                images = self._call("describe_images", f"image {image} of {template.id}", ImageIds=[image])
                if not images["Images"]:
                    raise ConfigError(
                        f"image {image} of the {name}'s launch template {template.id}: not found in "
                        f"{self._file.region}; run `terraform apply` with an image that exists there"
                    )

    def create_trainers(
        self, order: Order, tags: Mapping[str, str], token: str, price_max: float | None
    ) -> FleetAnswer:
        """Start all machines of the order or none; if EC2 starts fewer, return them with codes."""
        spot = order.nodes - order.on_demand
        same = {"SingleInstanceType": True, "SingleAvailabilityZone": True}
        template = _template(self._file.trainer_launch_template)
        request: dict[str, Any] = {
            "ClientToken": token,
            "Type": "instant",
            "LaunchTemplateConfigs": [
                {
                    "LaunchTemplateSpecification": template,
                    "Overrides": [{"InstanceType": name, "SubnetId": order.subnet} for name in order.types],
                }
            ],
            "TargetCapacitySpecification": {
                "TotalTargetCapacity": order.nodes,
                "SpotTargetCapacity": spot,
                "OnDemandTargetCapacity": order.on_demand,
                "DefaultTargetCapacityType": "spot",
            },
            "TagSpecifications": [_tagged("fleet", tags), _tagged("instance", tags)],
        }
        if spot:
            request["SpotOptions"] = {
                "AllocationStrategy": "price-capacity-optimized",
                "InstanceInterruptionBehavior": "terminate",
                "MinTargetCapacity": spot,
                **same,
                **({} if price_max is None else {"MaxTotalPrice": f"{price_max:.4f}"}),
            }
        if order.on_demand:
            request["OnDemandOptions"] = {
                "AllocationStrategy": "lowest-price",
                "MinTargetCapacity": order.on_demand,
                **same,
            }
        response = self._call_refusable("create_fleet", f"a fleet of {order.nodes}", **request)
        if isinstance(response, FleetAnswer):
            return response
        ids = tuple(i for group in response.get("Instances", ()) for i in group.get("InstanceIds", ()))
        errors = response.get("Errors", ())
        codes = tuple(dict.fromkeys(e.get("ErrorCode", "unknown") for e in errors))
        message = "; ".join(dict.fromkeys(e.get("ErrorMessage", "") for e in errors))
        if len(ids) >= order.nodes:
            return FleetAnswer(ids)
        if unexpected := [code for code in codes if code not in _REFUSALS]:
            raise ConfigError(f"EC2 in {self._file.region}: {', '.join(unexpected)}: {message}")
        return FleetAnswer(ids, codes or ("InsufficientInstanceCapacity",), message)

    def create_stager(self, subnet: str, tags: Mapping[str, str], token: str) -> FleetAnswer:
        """Start one on-demand machine."""
        response = self._call_refusable(
            "run_instances",
            "the stager",
            ClientToken=token,
            MinCount=1,
            MaxCount=1,
            LaunchTemplate=_template(self._file.stager_launch_template),
            SubnetId=subnet,
            TagSpecifications=[_tagged("instance", tags), _tagged("volume", tags)],
        )
        if isinstance(response, FleetAnswer):
            return response
        return FleetAnswer(tuple(instance["InstanceId"] for instance in response["Instances"]))

    def terminate(self, ids: Sequence[str]) -> None:
        """Terminate these machines. Machines that no longer exist are not an error."""
        if not ids:
            return
        try:
            self._call("terminate_instances", f"terminate {', '.join(ids)}", InstanceIds=list(ids))
        except ConfigError as error:
            if "InvalidInstanceID.NotFound" not in str(error):
                raise

    def leftovers(self, tags: Mapping[str, str]) -> tuple[str, ...]:
        """Return ids of volumes, network interfaces and open spot requests with these tags."""
        filters = [{"Name": f"tag:{name}", "Values": [value]} for name, value in tags.items()]
        volumes = self._pages("describe_volumes", "Volumes", Filters=filters)
        interfaces = self._pages("describe_network_interfaces", "NetworkInterfaces", Filters=filters)
        requests = self._pages("describe_spot_instance_requests", "SpotInstanceRequests", Filters=filters)
        return (
            *(v["VolumeId"] for v in volumes if v.get("State") not in {"deleting", "deleted"}),
            *(i["NetworkInterfaceId"] for i in interfaces),
            *(r["SpotInstanceRequestId"] for r in requests if r.get("State") in {"open", "active"}),
        )

    def spot_prices(self, types: Sequence[str]) -> dict[tuple[str, str], float]:
        """Return the newest spot prices by type and zone, in US dollars per hour."""
        found: dict[tuple[str, str], tuple[datetime, float]] = {}
        history = self._pages(
            "describe_spot_price_history",
            "SpotPriceHistory",
            InstanceTypes=list(types),
            ProductDescriptions=["Linux/UNIX"],
            StartTime=datetime.now(UTC),  # selects the current price for each type and zone
        )
        for item in history:
            key = (item["InstanceType"], item["AvailabilityZone"])
            if key not in found or item["Timestamp"] > found[key][0]:
                found[key] = (item["Timestamp"], float(item["SpotPrice"]))
        return {place: price for place, (_, price) in sorted(found.items())}

    # -- calls -----------------------------------------------------------------------------------------------------

    def _pages(self, operation: str, key: str, **arguments: Any) -> list[Any]:
        found: list[Any] = []
        token: dict[str, str] = {}
        while True:
            response = self._call(operation, operation, **arguments, **token)
            found += response.get(key, [])
            if not response.get("NextToken"):
                return found
            token = {"NextToken": response["NextToken"]}

    def _call_refusable(self, operation: str, what: str, **arguments: Any) -> Any:
        """Call EC2; turn a refusal for lack of capacity into a `FleetAnswer` with its code."""
        try:
            return self._call(operation, what, **arguments)
        except (ConfigError, PeerLost) as error:
            details = getattr(error.__cause__, "response", {}).get("Error", {})
            if details.get("Code") in _REFUSALS:
                return FleetAnswer((), (details["Code"],), details.get("Message", ""))
            raise

    def _call(self, operation: str, what: str, **arguments: Any) -> Any:
        from botocore import exceptions

        region = self._file.region
        try:
            return getattr(self._client, operation)(**arguments)
        except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError) as error:
            raise ConfigError(
                "no AWS credentials: give this machine the operator's role, or set AWS_PROFILE or AWS_ACCESS_KEY_ID "
                f"({error})"
            ) from error
        except (exceptions.EndpointConnectionError, exceptions.ConnectTimeoutError) as error:
            raise PeerLost(
                f"EC2 in {region} cannot be reached: {error}; check the region and the network"
            ) from error
        except exceptions.ClientError as error:
            raise _explain_error(error, what, region) from error
        except exceptions.BotoCoreError as error:
            raise PeerLost(f"EC2 in {region}, {what}: {error}") from error


def _explain_error(error: Any, what: str, region: str) -> ConfigError | PeerLost:
    details = error.response.get("Error", {})
    code, message = str(details.get("Code", "unknown")), str(details.get("Message", ""))
    where = f"EC2 in {region}, {what}: {code}: {message}"
    for codes, advice in _ADVICE.items():
        if re.fullmatch(codes, code):
            return ConfigError(f"{where}; {advice}")
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400)
    if status >= 500 or "LimitExceeded" in code or "Throttl" in code:
        return PeerLost(f"{where}; run the same command again later: it continues from here")
    return ConfigError(where)


def _client(region: str) -> Any:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    try:
        # boto3 may retry, because a ClientToken makes the repetition of a call harmless.
        settings = Config(retries={"mode": "standard", "total_max_attempts": 6}, user_agent_extra="holdfast")
        session: Any = boto3.session.Session()
        return session.client("ec2", region_name=region, config=settings)
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(
            f"the AWS settings cannot be used: {error}; see AWS_PROFILE and ~/.aws/config"
        ) from error


def _template(template: Template) -> dict[str, str]:
    return {"LaunchTemplateId": template.id, "Version": template.version}


def _tagged(kind: str, tags: Mapping[str, str]) -> dict[str, Any]:
    return {
        "ResourceType": kind,
        "Tags": [{"Key": name, "Value": value} for name, value in sorted(tags.items())],
    }


def _node(instance: Mapping[str, Any]) -> Node:
    tags = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", ())}
    placement = instance.get("Placement", {})
    return Node(
        instance["InstanceId"],
        tags.get("Role", ""),
        instance["State"]["Name"],
        instance.get("InstanceType", ""),
        instance.get("PrivateIpAddress", ""),
        placement.get("AvailabilityZone", ""),
        instance.get("SubnetId", ""),
        instance.get("InstanceLifecycle") == "spot",
        instance["LaunchTime"],
        tags.get("Generation", ""),
        tags,
        (instance.get("StateReason") or {}).get("Code", ""),
    )
